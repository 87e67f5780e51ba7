// Linear layers with weights packed once, in a reduced precision: the loops that all precisions share.
//
// A step is four bytes along the depth: two bfloat16 or four int8, which one instruction multiplies and adds in each lane.
// Weights are in panels of 32 columns: for each step the 32 columns' four bytes, padded with zeros. The rows of x are
// encoded at each call, in tiles of up to 12 rows: for each 16 steps a cache line of every row. So 12 × 32 sums stay in
// registers, and operands are read in order. Projections of one x encode it once, and their panels are divided among
// threads as those of one weight.
//
// A `Scheme` is a precision: how it encodes rows, adds products, and makes numbers of sums.
#pragma once

namespace linear {

using namespace lanes;

constexpr int kRows = 12, kColumns = 32, kSteps = 16;
constexpr int64_t kLine = 64, kStepBytes = 4 * kColumns;
constexpr int64_t kPiece = 1 << 13;  // elements of images that are encoded at once
using Numbers = Pack<float, kColumns>;

template <class T>
struct Part { using type = typename Pack<T, kNative>::Part; };

// Some panels that are multiplied by a tile at once.
struct Panels {
  const char* data;
  int64_t bytes;       // of one panel
  const char* ahead;   // what is multiplied next
  int lines_ahead;     // to prefetch of it for each cache line of a row
  int64_t block;       // steps that share scales, if weights are quantized in blocks
  bool has_zero_points;
};

template <class Scheme, int R, int P>
void multiply_steps(const char* x, const Panels& panels, int64_t steps, typename Scheme::Sum* sums) {
  using V = typename Part<typename Scheme::Sum>::type;
  constexpr int64_t kAhead = 4096;
  const char *w = panels.data, *ahead = panels.ahead;
  V sum[R][2 * P] = {};
  for (; steps > 0; steps -= kSteps, x += R * kLine) {
    for (int i = 0; i < panels.lines_ahead; ++i, ahead += kLine) __builtin_prefetch(ahead, 0, 2);
    const int here = static_cast<int>(std::min<int64_t>(kSteps, steps));
    for (int step = 0; step < here; ++step, w += kStepBytes) {
      V weights[2 * P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        std::memcpy(&weights[2 * p], w + p * panels.bytes, sizeof(V));
        std::memcpy(&weights[2 * p + 1], w + p * panels.bytes + kLine, sizeof(V));
        if constexpr (P > 1) {
          __builtin_prefetch(w + p * panels.bytes + kAhead);
          __builtin_prefetch(w + p * panels.bytes + kAhead + kLine);
        }
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        int32_t pair;
        std::memcpy(&pair, x + r * kLine + step * 4, sizeof pair);
        const auto row = Scheme::everywhere(pair);
#pragma GCC unroll 8
        for (int p = 0; p < 2 * P; ++p) sum[r][p] = Scheme::add(sum[r][p], row, weights[p]);
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) std::memcpy(sums + (p * R + r) * kColumns, sum[r] + 2 * p, 2 * sizeof(V));
  }
}

// The panels of a tile that are multiplied at once: with few rows, more of them to hide latency.
constexpr int panels_at_once(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }

template <class Scheme>
using Multiply = void (*)(const char*, const Panels&, int64_t, typename Scheme::Sum*);

template <class Scheme, size_t... R>
Multiply<Scheme> multiply_of(int rows, bool one_panel, std::index_sequence<R...>) {
  static constexpr Multiply<Scheme> one[] = {Scheme::template multiply<R + 1, 1>...};
  static constexpr Multiply<Scheme> several[] = {Scheme::template multiply<R + 1, panels_at_once(R + 1)>...};
  return (one_panel ? one : several)[rows - 1];
}

template <class T>
LANES_INLINE void put_all(T* to, Numbers numbers) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bfloat>) {  // one instruction, which takes denormal numbers for zero
    const auto [low, high] = numbers.parts;
    const auto narrow = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low));
    std::memcpy(static_cast<void*>(to), &narrow, sizeof narrow);
    return;
  }
#endif
  put(to, numbers);
}

// Columns of one panel, fewer than all of it at the end of the weights.
struct Columns {
  int64_t first, count;

  template <class T>
  auto read(const T* from) const {
    if (count == kColumns) return row<kColumns>(from + first);
    T padded[kColumns] = {};
    std::memcpy(static_cast<void*>(padded), from + first, count * sizeof(T));
    return row<kColumns>(static_cast<const T*>(padded));
  }
  template <class T>
  void write(T* to, Numbers numbers) const {
    if (count == kColumns) return put_all(to + first, numbers);
    T padded[kColumns];
    put_all(static_cast<T*>(padded), numbers);
    std::memcpy(static_cast<void*>(to + first), padded, count * sizeof(T));
  }
};

template <Activation kind>
LANES_INLINE Numbers activated(Numbers x) {
  if constexpr (kind == Activation::kRelu) return relu(x);
  else if constexpr (kind == Activation::kGelu) return x * 0.5f * (error_function(Numbers(x * 0.70710678f)) + 1.0f);
  else if constexpr (kind == Activation::kTanhGelu) {
    return x * 0.5f * (hyperbolic_tangent(Numbers((x * x * x * 0.044715f + x) * 0.79788456f)) + 1.0f);
  } else if constexpr (kind == Activation::kSilu) return x * sigmoid(x);
  else return x;
}

template <class Scheme, class In, class Out>
class Product {
 public:
  explicit Product(const Call& call)
      : call_(call),
        steps_(Scheme::steps(call)),
        panel_bytes_(Scheme::panel_bytes(call)),
        row_bytes_(Scheme::lines(call) * kLine),
        tiles_(parts(call.rows, kRows)),
        panels_(count_panels(call)),
        encoded_(memory<char>(call.rows * row_bytes_)),
        codes_(memory<typename Scheme::Code>(call.rows)) {
    constexpr int64_t kBlockBytes = 256 << 10, kLeastTiles = 4, kWorth = 3 << 20;  // of a block of rows; of a task
    const int64_t most = std::max(kLeastTiles, kBlockBytes / (kRows * row_bytes_));
    row_blocks_ = parts(tiles_, most);
    const int64_t products = kRows * kColumns * std::max<int64_t>(steps_, 1) * (call.is_gated ? 2 : 1);
    const int64_t panel_work = parts(tiles_, row_blocks_) * products;
    const int64_t at_once = panels_at_once(height(0));
    const int64_t worth = parts(kWorth / 2 / std::max<int64_t>(1, panel_work), at_once) * at_once;
    task_panels_ = std::min(panels_, worth);
  }

  ort::Status* run(const ort::Context* context) {
    if (!panels_) return nullptr;
    if (auto* status = encode_rows(context)) return status;
    const int64_t across = parts(panels_, task_panels_);
    return ort::parallel(context, row_blocks_ * across, [&](size_t task) {
      const int64_t block = task / across, first = task % across * task_panels_;
      const int64_t tiles = block * tiles_ / row_blocks_, end_tiles = (block + 1) * tiles_ / row_blocks_;
      compute(tiles, end_tiles, first, std::min(panels_, first + task_panels_));
    });
  }

 private:
  static int64_t count_panels(const Projection& projection) { return (projection.columns + kColumns - 1) / kColumns; }
  // Of a gated call those of the first projection, each with the one of the second.
  static int64_t count_panels(const Call& call) {
    int64_t panels = 0;
    for (int i = 0; i < (call.is_gated ? 1 : call.count); ++i) panels += count_panels(call.projections[i]);
    return panels;
  }
  int64_t first_row(int64_t tile) const {  // tiles of equal heights, but for one
    return tile * (call_.rows / tiles_) + std::min(tile, call_.rows % tiles_);
  }
  // The cache lines of a panel for each cache line of a row.
  int64_t chunk_lines() const { return parts(panel_bytes_, std::max<int64_t>(1, steps_ / kSteps) * kLine); }
  int height(int64_t tile) const { return static_cast<int>(first_row(tile + 1) - first_row(tile)); }
  char* tile_data(int64_t tile) const { return encoded_.get() + first_row(tile) * row_bytes_; }

  using Code = typename Scheme::Code;

  ort::Status* encode_rows(const ort::Context* context) {
    const In* const x = static_cast<const In*>(call_.x);
    if (call_.window && overlaps(*call_.window)) {  // encode each element once, not in each window
      if constexpr (!Scheme::kRoundsElements) return encode_quantized(context, x);
      else if constexpr (std::is_same_v<In, float>) return encode_rounded(context, x);
    }
    return encode_tiles(context, x, nullptr);
  }
  static bool overlaps(const Window& w) { return w.height * w.width > w.stride_y * w.stride_x; }

  // Calls `body(first, count)` for pieces of some elements.
  template <class F>
  static ort::Status* by_piece(const ort::Context* context, int64_t count, const F& body) {
    return spread(context, parts(count, kPiece), kPiece / 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * kPiece; i < std::min(count, end * kPiece); i += kPiece) body(i, std::min(kPiece, count - i));
    });
  }

  ort::Status* encode_rounded(const ort::Context* context, const float* x) {
    const int64_t count = call_.window->elements(call_.images);
    const auto rounded = memory<bfloat>(count);
    auto* status = by_piece(context, count, [&](int64_t first, int64_t some) {
      for (int64_t i = first; i < first + some; i += kColumns) {
        const Columns columns{i, std::min<int64_t>(kColumns, first + some - i)};
        columns.write(rounded.get(), columns.read(x));
      }
    });
    return status ? status : encode_tiles(context, rounded.get(), nullptr);
  }

  ort::Status* encode_quantized(const ort::Context* context, const In* x) {
    const int64_t size = call_.window->elements(1), pieces = parts(size, kPiece);
    const auto quantized = memory<uint8_t>(call_.images * size);
    const auto codes = memory<Code>(call_.images);
    const auto limits = memory<typename Scheme::Limits>(pieces);
    for (int64_t image = 0; image < call_.images; ++image, x += size) {
      auto* status = by_piece(context, size, [&](int64_t first, int64_t some) {
        limits[first / kPiece] = Scheme::limits(x + first, some);
      });
      if (status) return status;
      for (int64_t piece = 1; piece < pieces; ++piece) limits[0].add(limits[piece]);
      const typename Scheme::Quantizer quantize(limits[0]);
      codes[image] = quantize.code;
      uint8_t* const to = quantized.get() + image * size;
      status = by_piece(context, size, [&](int64_t first, int64_t some) { quantize(x + first, some, to + first); });
      if (status) return status;
    }
    return encode_tiles(context, static_cast<const uint8_t*>(quantized.get()), codes.get());
  }

  // `codes` are those of images that are quantized already.
  template <class T>
  ort::Status* encode_tiles(const ort::Context* context, const T* x, const Code* codes) {
    return spread(context, tiles_, kRows * call_.depth / 4, [this, x, codes](int64_t begin, int64_t end) {
      const auto window = memory<T>(call_.window ? call_.depth : 0);
      for (int64_t tile = begin; tile < end; ++tile) encode(tile, x, codes, window.get());
    });
  }

  template <class T>
  void encode(int64_t tile, const T* x, const Code* codes, T* window) {
    const int64_t first = first_row(tile);
    const int rows = height(tile);
    char* to = tile_data(tile);
    for (int r = 0; r < rows; ++r, to += kLine) {
      const T* from = x + (first + r) * call_.depth;
      Code& code = codes_[first + r];
      if (call_.window) {
        if (codes) code = codes[(first + r) / (call_.rows / call_.images)];
        T around{};
        if constexpr (std::is_same_v<T, uint8_t>) around = static_cast<uint8_t>(code.zero);
        gather(*call_.window, x, first + r, around, window);
        from = window;
      }
      Scheme::encode(from, call_, to, rows * kLine, code);
    }
  }

  // Copies the window at a place of the result; `around` is what zeros around the image are.
  template <class T>
  static void gather(const Window& w, const T* images, int64_t place, T around, T* to) {
    const int64_t x = place % w.out_width, y = place / w.out_width % w.out_height;
    const T* const image = images + place / w.out_width / w.out_height * w.image_height * w.image_width * w.channels;
    const int64_t top = y * w.stride_y - w.top, left = x * w.stride_x - w.left, size = w.width * w.channels;
    const windows::Inside rows(top, w.dilation_y, w.height, w.image_height);
    const windows::Inside columns(left, w.dilation_x, w.width, w.image_width);
    to = std::fill_n(to, rows.first * size, around);
    for (int64_t i = rows.first; i < rows.end; ++i) {
      const T* from = image + ((top + i * w.dilation_y) * w.image_width + left + columns.first * w.dilation_x) * w.channels;
      to = std::fill_n(to, columns.first * w.channels, around);
      if (w.dilation_x == 1) to = std::copy_n(from, (columns.end - columns.first) * w.channels, to);
      else {
        for (int64_t j = columns.first; j < columns.end; ++j, from += w.dilation_x * w.channels) {
          to = std::copy_n(from, w.channels, to);
        }
      }
      to = std::fill_n(to, (w.width - columns.end) * w.channels, around);
    }
    std::fill_n(to, (w.height - rows.end) * size, around);
  }

  void compute(int64_t first_tile, int64_t end_tile, int64_t panel, int64_t end_panel) const {
    const int64_t tiles[] = {first_tile, end_tile};
    for (int i = 0; panel < end_panel; ++i) {
      const Projection& projection = call_.projections[i];
      const int64_t panels = count_panels(projection);
      if (panel < panels) {
        const int64_t end = std::min(panels, end_panel);
        if (call_.is_gated) compute_gated(tiles, panel, end);
        else compute_plain(tiles, projection, panel, end);
        panel = end;
      }
      panel -= panels, end_panel -= panels;
    }
  }

  Panels panels_of(const Projection& projection, int64_t panel, int lines) const {
    const char* const data = static_cast<const char*>(projection.weights) + panel * panel_bytes_;
    return {data, panel_bytes_, data + panel_bytes_, lines, call_.block / Scheme::kGroup, call_.has_zero_points};
  }

  static constexpr auto kHeights = std::make_index_sequence<kRows>{};

  void compute_plain(const int64_t (&tiles)[2], const Projection& projection, int64_t panel, int64_t end) const {
    alignas(64) typename Scheme::Sum sums[kRows * kColumns];
    const int64_t last = count_panels(projection) - 1;
    const int most = panels_at_once(height(tiles[0]));  // several only if there is one tile
    while (panel < end) {
      const int count = end - panel < most ? 1 : most;
      const int lines = count == 1 && panel < last ? parts(chunk_lines(), tiles[1] - tiles[0]) : 0;
      Panels panels = panels_of(projection, panel, lines);
      for (int64_t tile = tiles[0]; tile < tiles[1]; ++tile) {
        const int rows = height(tile);
        for (int i = 0; i < count; ++i) prefetch_result(projection, first_row(tile), rows, panel + i);
        multiply_of<Scheme>(rows, count == 1, kHeights)(tile_data(tile), panels, steps_, sums);
        for (int i = 0; i < count; ++i) finish(projection, sums + i * rows * kColumns, first_row(tile), rows, panel + i);
        panels.ahead += lines * row_bytes_;
      }
      panel += count;
    }
  }

  void compute_gated(const int64_t (&tiles)[2], int64_t panel, int64_t end) const {
    alignas(64) typename Scheme::Sum sums[2][kRows * kColumns];
    const Projection &gate = call_.projections[0], &other = call_.projections[1];
    const int64_t last = count_panels(gate) - 1;
    const int most = panels_at_once(height(tiles[0]));
    while (panel < end) {
      const int count = end - panel < most ? 1 : most;
      const int lines = count == 1 && panel < last ? parts(chunk_lines(), tiles[1] - tiles[0]) : 0;
      Panels both[] = {panels_of(gate, panel, lines), panels_of(other, panel, lines)};
      for (int64_t tile = tiles[0]; tile < tiles[1]; ++tile) {
        const int rows = height(tile);
        for (int i = 0; i < count; ++i) prefetch_result(gate, first_row(tile), rows, panel + i);
        for (int i = 0; i < 2; ++i) {
          multiply_of<Scheme>(rows, count == 1, kHeights)(tile_data(tile), both[i], steps_, sums[i]);
          both[i].ahead += lines * row_bytes_;
        }
        for (int i = 0; i < count; ++i) {
          const int64_t from = i * rows * kColumns;
          finish_gated(sums[0] + from, sums[1] + from, first_row(tile), rows, panel + i);
        }
      }
      panel += count;
    }
  }

  // Fetches the memory of a tile of y while it is computed.
  void prefetch_result(const Projection& projection, int64_t row, int rows, int64_t panel) const {
    const Out* to = static_cast<const Out*>(projection.y) + row * projection.columns + panel * kColumns;
    for (int r = 0; r < rows; ++r, to += projection.columns) {
      __builtin_prefetch(to, 1);
      __builtin_prefetch(reinterpret_cast<const char*>(to) + kLine, 1);
    }
  }

  using Sums = const typename Scheme::Sum*;

  // Calls `body` with the activation as a constant.
  template <class F>
  void with_activation(const F& body) const {
    switch (call_.activation) {
      case Activation::kNone: return body(std::integral_constant<Activation, Activation::kNone>{});
      case Activation::kRelu: return body(std::integral_constant<Activation, Activation::kRelu>{});
      case Activation::kGelu: return body(std::integral_constant<Activation, Activation::kGelu>{});
      case Activation::kTanhGelu: return body(std::integral_constant<Activation, Activation::kTanhGelu>{});
      case Activation::kSilu: return body(std::integral_constant<Activation, Activation::kSilu>{});
    }
  }

  static Columns columns_of(const Projection& projection, int64_t panel) {
    return {panel * kColumns, std::min<int64_t>(kColumns, projection.columns - panel * kColumns)};
  }
  static Numbers bias_of(const Projection& projection, const Columns& columns) {
    return projection.bias ? columns.read(projection.bias) : Numbers{};
  }

  void finish(const Projection& projection, Sums sums, int64_t row, int rows, int64_t panel) const {
    with_activation([&](auto kind) {
      const Columns columns = columns_of(projection, panel);
      const Numbers bias = bias_of(projection, columns);
      const typename Scheme::Weights weights(projection, columns);
      for (int r = 0; r < rows; ++r) {
        const int64_t at = (row + r) * projection.columns;
        Numbers y = weights.numbers(sums + r * kColumns, codes_[row + r]) + bias;
        if (!call_.activates_sum) y = activated<kind()>(y);
        if (call_.residual) y = y + columns.read(static_cast<const Out*>(call_.residual) + at);
        if (call_.activates_sum) y = activated<kind()>(y);
        columns.write(static_cast<Out*>(projection.y) + at, y);
      }
    });
  }

  void finish_gated(Sums gate_sums, Sums other_sums, int64_t row, int rows, int64_t panel) const {
    with_activation([&](auto kind) {
      const Projection &gate = call_.projections[0], &other = call_.projections[1];
      const Columns columns = columns_of(gate, panel);
      const Numbers biases[] = {bias_of(gate, columns), bias_of(other, columns)};
      const typename Scheme::Weights weights[] = {{gate, columns}, {other, columns}};
      for (int r = 0; r < rows; ++r) {
        const auto& code = codes_[row + r];
        const Numbers y = activated<kind()>(weights[0].numbers(gate_sums + r * kColumns, code) + biases[0]);
        const Numbers by = weights[1].numbers(other_sums + r * kColumns, code) + biases[1];
        columns.write(static_cast<Out*>(gate.y) + (row + r) * gate.columns, y * by);
      }
    });
  }

  const Call& call_;
  int64_t steps_, panel_bytes_, row_bytes_, tiles_, panels_, row_blocks_, task_panels_;
  std::unique_ptr<char[], Free> encoded_;
  std::unique_ptr<typename Scheme::Code[], Free> codes_;
};

template <class Scheme, class In>
ort::Status* run_as(const ort::Context* context, const Call& call) {
  if (call.y_type == Type::kFloat) return Product<Scheme, In, float>(call).run(context);
  return Product<Scheme, In, bfloat>(call).run(context);
}
template <class Scheme>
ort::Status* run_as(const ort::Context* context, const Call& call) {
  if (!call.rows) return nullptr;
  if (call.x_type == Type::kFloat) return run_as<Scheme, float>(context, call);
  return run_as<Scheme, bfloat>(context, call);
}

}  // namespace linear
