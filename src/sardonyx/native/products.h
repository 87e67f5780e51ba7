// Matrix products: out[b, m, n] = Σₖ left[b, m, k] · right[b, k, n], where b, m, n and k are each any number of axes,
// of any strides. A convolution is one too: windows over an image are axes that share its memory.
//
// A block of the result is one unit of work. Its operands are packed into panels in register order, with as many k at a
// time as fit in the caches, converted to the type of the computation.
#pragma once

namespace {

#if defined(__AVX512F__)
constexpr int kRows = 12;
#else
constexpr int kRows = 6;
#endif
template <class T>
constexpr int kColumns = 2 * Pack<T, kNative>::kLong;  // kRows × kColumns sums fit in registers
constexpr int64_t kBlockRows = 96, kBlockColumns = 256, kBlockDepth = 192;

// Several axes, with their strides in the operands and in the result.
struct Axes {
  struct Axis { int64_t size, left, right, out; };
  using Stride = int64_t Axis::*;
  static constexpr int kMost = 8;
  int count;
  Axis axis[kMost];

  int64_t size() const {
    int64_t product = 1;
    for (int i = 0; i < count; ++i) product *= axis[i].size;
    return product;
  }
  // Offsets of the elements from `first` on.
  void offsets(int64_t first, int64_t many, Stride stride, int64_t* to) const {
    if (!many) return;  // an axis may be empty
    int64_t place[kMost], at = 0;
    for (int i = count - 1; i >= 0; --i) {
      place[i] = first % axis[i].size;
      first /= axis[i].size;
      at += place[i] * (axis[i].*stride);
    }
    for (int64_t n = 0; n < many; ++n) {
      to[n] = at;
      for (int i = count - 1; i >= 0; --i) {
        at += axis[i].*stride;
        if (++place[i] < axis[i].size) break;
        at -= axis[i].size * (axis[i].*stride);
        place[i] = 0;
      }
    }
  }
  int64_t offset(int64_t place, Stride stride) const {
    int64_t at;
    offsets(place, 1, stride, &at);
    return at;
  }
  void swap_operands() {
    for (int i = 0; i < count; ++i) std::swap(axis[i].left, axis[i].right);
  }
};

inline bool in_order(const int64_t* offsets, int64_t many) {
  for (int64_t i = 1; i < many; ++i) {
    if (offsets[i] != offsets[0] + i) return false;
  }
  return true;
}

// Packs lines of a matrix into panels of W: for each k the elements of W lines, padded with zeros.
template <int W, class T, class In>
void pack(const In* from, const int64_t* lines, int64_t many, const int64_t* depth, int64_t deep, T* to) {
  const bool along = in_order(depth, deep);
  for (int64_t first = 0; first < many; first += W, lines += W, to += W * deep) {
    const int64_t here = std::min<int64_t>(W, many - first);
    if constexpr (W % kNative == 0) {
      if (here == W && in_order(lines, W)) {
        for (int64_t k = 0; k < deep; ++k) put(to + k * W, row<W>(from + lines[0] + depth[k]));
        continue;
      }
    }
    if (here < W) std::fill_n(to, W * deep, T{});
    if (along) {
      for (int64_t i = 0; i < here; ++i) {
        const In* const line = from + lines[i] + depth[0];
        for (int64_t k = 0; k < deep; ++k) to[k * W + i] = wide(line[k]);
      }
    } else {
      for (int64_t k = 0; k < deep; ++k) {
        for (int64_t i = 0; i < here; ++i) to[k * W + i] = wide(from[lines[i] + depth[k]]);
      }
    }
  }
}

// Adds the product of R rows of a panel and a panel of columns to sums in memory with a row stride.
template <int R, class T>
void multiply(const T* __restrict left, const T* __restrict right, int64_t deep, T* __restrict sums, int64_t step) {
  using Part = typename Pack<T, kNative>::Part;
  constexpr int lanes = Pack<T, kNative>::kLong;
  Part sum[R][2] = {};
  for (int64_t k = 0; k < deep; ++k, left += kRows, right += kColumns<T>) {
    Part low, high;
    std::memcpy(&low, right, sizeof low);
    std::memcpy(&high, right + lanes, sizeof high);
#if defined(__x86_64__)
    asm("" : "+v"(low), "+v"(high));  // or compilers would reload them for each row
#endif
#pragma GCC unroll 12
    for (int i = 0; i < R; ++i) {
      sum[i][0] += low * left[i];
      sum[i][1] += high * left[i];
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < R; ++i) {
    for (int half = 0; half < 2; ++half) {
      Part before;
      std::memcpy(&before, sums + i * step + half * lanes, sizeof before);
      before += sum[i][half];
      std::memcpy(sums + i * step + half * lanes, &before, sizeof before);
    }
  }
}

template <class In, class Out>
struct MatrixProduct {
  using T = typename Computed<In>::type;
  const In *left, *right;
  Out* out;
  Axes batch, rows, columns, depth;
  int64_t row_block = 0, column_block = 0;

  MatrixProduct(const In* l, const In* r, Out* o, Axes b, Axes m, Axes n, Axes k)
      : left(l), right(r), out(o), batch(b), rows(m), columns(n), depth(k) {
    if (2 * columns.size() < kColumns<T> && rows.size() > columns.size()) {  // lanes follow the longer side
      std::swap(left, right);
      std::swap(rows, columns);
      for (Axes* axes : {&batch, &rows, &columns, &depth}) axes->swap_operands();
    }
    int64_t widest = kBlockColumns;  // smaller if there are too few blocks for the threads
    const int64_t others = batch.size() * parts(rows.size(), kBlockRows);
    while (widest > 64 && others * parts(columns.size(), widest) < 8) widest /= 2;
    row_block = even(rows.size(), kBlockRows, kRows);
    column_block = even(columns.size(), widest, kColumns<T>);
  }
  // The size of equal blocks up to a maximum, each a multiple of a tile.
  static int64_t even(int64_t size, int64_t most, int64_t tile) {
    return parts(parts(size, parts(size, most)), tile) * tile;
  }

  int64_t units() const {
    const bool none = !batch.size() || !rows.size() || !columns.size();
    return none ? 0 : batch.size() * parts(rows.size(), row_block) * parts(columns.size(), column_block);
  }
  int64_t cost() const { return row_block * column_block / 16 * std::max<int64_t>(depth.size(), 1); }

  void run(int64_t begin, int64_t end) const {
    const int64_t deepest = std::min(depth.size(), kBlockDepth);
    const auto left_panels = memory<T>(row_block * deepest), right_panels = memory<T>(column_block * deepest);
    const auto sums = memory<T>(row_block * column_block);
    const auto row_offsets = memory<int64_t>(row_block), column_offsets = memory<int64_t>(column_block);
    const auto left_depth = memory<int64_t>(deepest), right_depth = memory<int64_t>(deepest);
    const int64_t across = parts(columns.size(), column_block), down = parts(rows.size(), row_block);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t which = unit / across / down;
      const int64_t row = unit / across % down * row_block, column = unit % across * column_block;
      const int64_t height = std::min(row_block, rows.size() - row);
      const int64_t width = std::min(column_block, columns.size() - column);
      rows.offsets(row, height, &Axes::Axis::left, row_offsets.get());
      columns.offsets(column, width, &Axes::Axis::right, column_offsets.get());
      std::fill_n(sums.get(), row_block * column_block, T{});
      for (int64_t k = 0; k < depth.size(); k += kBlockDepth) {
        const int64_t deep = std::min(kBlockDepth, depth.size() - k);
        depth.offsets(k, deep, &Axes::Axis::left, left_depth.get());
        depth.offsets(k, deep, &Axes::Axis::right, right_depth.get());
        pack<kRows>(left + batch.offset(which, &Axes::Axis::left), row_offsets.get(), height, left_depth.get(), deep,
                    left_panels.get());
        pack<kColumns<T>>(right + batch.offset(which, &Axes::Axis::right), column_offsets.get(), width,
                          right_depth.get(), deep, right_panels.get());
        add(left_panels.get(), right_panels.get(), height, width, deep, sums.get());
      }
      rows.offsets(row, height, &Axes::Axis::out, row_offsets.get());
      columns.offsets(column, width, &Axes::Axis::out, column_offsets.get());
      write(out + batch.offset(which, &Axes::Axis::out), sums.get(), row_offsets.get(), height, column_offsets.get(),
            width);
    }
  }

  void add(const T* left, const T* right, int64_t height, int64_t width, int64_t deep, T* sums) const {
    constexpr int some = kRows / 3;
    for (int64_t n = 0; n < width; n += kColumns<T>) {
      for (int64_t m = 0; m < height; m += kRows) {
        const T *a = left + m * deep, *b = right + n * deep;
        T* const to = sums + m * column_block + n;
        if (height - m == 1) multiply<1>(a, b, deep, to, column_block);
        else if (height - m <= some) multiply<some>(a, b, deep, to, column_block);
        else multiply<kRows>(a, b, deep, to, column_block);
      }
    }
  }
  void write(Out* to, const T* sums, const int64_t* rows, int64_t height, const int64_t* columns, int64_t width) const {
    const bool along = in_order(columns, width);
    for (int64_t i = 0; i < height; ++i, sums += column_block) {
      Out* const line = to + rows[i];
      if (along) {
        sweep<2 * kNative>(0, width, [&](auto w, int64_t j) { put(line + columns[0] + j, row<w>(sums + j)); });
      } else {
        for (int64_t j = 0; j < width; ++j) line[columns[j]] = stored<Out>(sums[j]);
      }
    }
  }
};

}  // namespace
