// Attention in bfloat16, with sums and softmax in float32.
//
// Keys and values are packed at each call as the weights of linear layers are, so the loops of these multiply them: a
// panel has 32 keys side by side, or 32 columns of the values. A tile of up to 12 queries goes over the keys in blocks,
// whose scores stay in the cache. When a block has a larger score than those before, their sums are scaled down. Few
// queries, as those of a step that decodes a token, read keys and values where they are, and multiply them in float32.
#pragma once

namespace attention {

using namespace lanes;
using linear::kColumns, linear::kLine, linear::kRows, linear::kStepBytes, linear::kSteps, linear::Numbers;
using Line = linear::Bfloat16;

constexpr int64_t kBlockPanels = 16, kBlock = kBlockPanels * kColumns;  // keys of a block
constexpr float kMasked = -std::numeric_limits<float>::infinity();

inline int64_t quotient(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
LANES_INLINE const T* at(const Rows& rows, int64_t batch, int64_t head, int64_t token) {
  return static_cast<const T*>(rows.data) + batch * rows.batch + head * rows.head + token * rows.token;
}
// The row of a key or a value: of the past ones, or of those after them.
template <class T>
LANES_INLINE const T* at(const Rows& past, int64_t count, const Rows& rows, int64_t batch, int64_t head, int64_t token) {
  return token < count ? at<T>(past, batch, head, token) : at<T>(rows, batch, head, token - count);
}
// Calls visit(key, row) for the first keys or values of a head.
template <class T, class Visit>
LANES_INLINE void each(const Rows& past, int64_t count, const Rows& rows, int64_t batch, int64_t head, int64_t end, Visit visit) {
  const int64_t before = std::min(count, end);
  const T* row = before ? at<T>(past, batch, head, 0) : nullptr;
  for (int64_t key = 0; key < before; ++key, row += past.token) visit(key, row);
  row = at<T>(rows, batch, head, 0);
  for (int64_t key = before; key < end; ++key, row += rows.token) visit(key, row);
}

// A cache line of 32 numbers in bfloat16, with zeros after the end of the row.
template <class In>
LANES_INLINE __m512i line_of(const In* from, int64_t count) {
  return count > 0 ? (__m512i)Line::encoded(from, count) : _mm512_setzero_si512();
}

// Swaps the upper right and lower left blocks of 2·by rows and columns.
template <int by>
LANES_INLINE void swap_blocks(__m512i (&x)[16]) {
  alignas(64) int32_t low[16], high[16];
  for (int lane = 0; lane < 16; ++lane) {
    low[lane] = lane & by ? 16 + lane - by : lane;
    high[lane] = lane & by ? 16 + lane : lane + by;
  }
  const __m512i lows = _mm512_load_si512(low), highs = _mm512_load_si512(high);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i & by) continue;
    const __m512i above = x[i], below = x[i + by];
    x[i] = _mm512_permutex2var_epi32(above, lows, below);
    x[i + by] = _mm512_permutex2var_epi32(above, highs, below);
  }
}
LANES_INLINE void transpose(__m512i (&x)[16]) {
  swap_blocks<8>(x);
  swap_blocks<4>(x);
  swap_blocks<2>(x);
  swap_blocks<1>(x);
}

LANES_INLINE Numbers below(int64_t end, Numbers x) {  // masks numbers from `end` on
  alignas(64) static constexpr float kPlaces[kColumns] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                          16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
  if (end >= kColumns) return x;
  return select(less(row<kColumns>(kPlaces), all<Numbers>(static_cast<float>(end))), x, all<Numbers>(kMasked));
}
LANES_INLINE float largest_of(Numbers x) {
  return _mm512_reduce_max_ps(_mm512_max_ps((__m512)x.parts[0], (__m512)x.parts[1]));
}
LANES_INLINE float sum_of(Numbers x) { return _mm512_reduce_add_ps((__m512)x.parts[0] + (__m512)x.parts[1]); }

template <class In, class Out>
class Product {
 public:
  explicit Product(const Call& call)
      : call_(call),
        steps_(quotient(call.size, 2)),
        key_panels_(quotient(call.keys, kColumns)),
        value_panels_(quotient(call.value_size, kColumns)),
        key_bytes_(steps_ * kStepBytes),
        value_bytes_(key_panels_ * kSteps * kStepBytes),
        tiles_(quotient(call.queries, kRows)),
        keys_(memory<char>(call.batches * call.key_heads * key_panels_ * key_bytes_)),
        values_(memory<char>(call.batches * call.key_heads * value_panels_ * value_bytes_)) {}

  ort::Status* run(const ort::Context* context) {
    const int64_t pairs = call_.batches * call_.key_heads, width = call_.size + call_.value_size;
    auto* status = spread(context, pairs * key_panels_, 8 * width, [this](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) pack(unit / key_panels_, unit % key_panels_);
    });
    if (status) return status;
    const int64_t tiles = call_.batches * call_.heads * tiles_, cost = kRows * call_.keys * (width / 16 + 2);
    return spread(context, tiles, cost, [this](int64_t begin, int64_t end) {
      Tile tile(*this);
      for (int64_t unit = begin; unit < end; ++unit) attend(unit / tiles_, unit % tiles_, tile);
    });
  }

 private:
  // What a tile of queries has in memory: the queries in bfloat16, their scores with a block of keys, exponentials of
  // these, the sums of the values by them, and the largest score and the sum of exponentials of each query.
  struct Tile {
    explicit Tile(const Product& of)
        : queries(memory<char>(kRows * quotient(of.call_.size, kColumns) * kLine)),
          scores(memory<float>(kRows * kBlock)),
          powers(memory<bfloat>(kRows * kBlock)),
          sums(memory<float>(kRows * of.value_panels_ * kColumns)) {}
    std::unique_ptr<char[], Free> queries;
    std::unique_ptr<float[], Free> scores;
    std::unique_ptr<bfloat[], Free> powers;
    std::unique_ptr<float[], Free> sums;
    float largest[kRows], total[kRows];
    int64_t first;
    int rows;
  };

  char* key_panel(int64_t pair, int64_t panel) const { return keys_.get() + (pair * key_panels_ + panel) * key_bytes_; }
  char* value_panel(int64_t pair, int64_t panel) const {
    return values_.get() + (pair * value_panels_ + panel) * value_bytes_;
  }

  // Packs 32 keys and values of a batch and head.
  void pack(int64_t pair, int64_t panel) {
    const int64_t batch = pair / call_.key_heads, head = pair % call_.key_heads, first = panel * kColumns;
    const int64_t count = std::min<int64_t>(kColumns, call_.keys - first);
    const In *keys[kColumns], *values[kColumns];
    for (int64_t i = 0; i < count; ++i) {
      keys[i] = at<In>(call_.past_k, call_.past, call_.k, batch, head, first + i);
      values[i] = at<In>(call_.past_v, call_.past, call_.v, batch, head, first + i);
    }
    pack_keys(keys, count, key_panel(pair, panel));
    for (int64_t i = 0; i < value_panels_; ++i) {
      pack_values(values, count, i * kColumns, value_panel(pair, i) + panel * kSteps * kStepBytes);
    }
  }
  void pack_keys(const In* const* rows, int64_t count, char* to) const {
    for (int64_t step = 0; step < steps_; step += kSteps, to += kSteps * kStepBytes) {
      const int64_t here = std::min<int64_t>(kSteps, steps_ - step);
      for (int half = 0; half < 2; ++half) {
        __m512i lines[16];
        for (int i = 0; i < 16; ++i) {
          const int64_t key = 16 * half + i, at = 2 * step;
          lines[i] = key < count ? line_of(rows[key] + at, call_.size - at) : _mm512_setzero_si512();
        }
        transpose(lines);
        for (int64_t i = 0; i < here; ++i) _mm512_store_si512(to + i * kStepBytes + half * kLine, lines[i]);
      }
    }
  }
  void pack_values(const In* const* rows, int64_t count, int64_t first, char* to) const {
    alignas(64) int16_t low[32], high[32];
    for (int lane = 0; lane < 32; ++lane) {
      low[lane] = static_cast<int16_t>(lane / 2 + lane % 2 * 32);
      high[lane] = static_cast<int16_t>(low[lane] + 16);
    }
    for (int step = 0; step < kSteps; ++step, to += kStepBytes) {
      __m512i pair[2];
      for (int i = 0; i < 2; ++i) {
        const int64_t key = 2 * step + i;
        pair[i] = key < count ? line_of(rows[key] + first, call_.value_size - first) : _mm512_setzero_si512();
      }
      _mm512_store_si512(to, _mm512_permutex2var_epi16(pair[0], _mm512_load_si512(low), pair[1]));
      _mm512_store_si512(to + kLine, _mm512_permutex2var_epi16(pair[0], _mm512_load_si512(high), pair[1]));
    }
  }

  static void multiply(int rows, const char* left, const char* panel, int64_t steps, float* sums) {
    const linear::Panels panels{panel, 0, panel, 0, 0, false};
    linear::multiply_of<Line>(rows, true, std::make_index_sequence<kRows>{})(left, panels, steps, sums);
  }

  void attend(int64_t head_of_batch, int64_t number, Tile& tile) const {
    const int64_t batch = head_of_batch / call_.heads, head = head_of_batch % call_.heads;
    const int64_t pair = batch * call_.key_heads + head / (call_.heads / call_.key_heads);
    tile.first = number * (call_.queries / tiles_) + std::min(number, call_.queries % tiles_);
    tile.rows = static_cast<int>(call_.queries / tiles_ + (number < call_.queries % tiles_));
    std::fill_n(tile.largest, kRows, kMasked);
    std::fill_n(tile.total, kRows, 0.0f);
    std::fill_n(tile.sums.get(), kRows * value_panels_ * kColumns, 0.0f);
    read_queries(at<In>(call_.q, batch, head, tile.first), tile);
    const int64_t end = call_.causal ? std::min(call_.keys, tile.first + tile.rows) : call_.keys;
    for (int64_t key = 0; key < end; key += kBlock) {
      const int64_t panels = quotient(std::min(kBlock, end - key), kColumns);
      add_block(batch, head, pair, key, panels, tile);
    }
    write(batch, head, tile);
  }
  void read_queries(const In* from, Tile& tile) const {
    char* to = tile.queries.get();
    for (int64_t k = 0; k < call_.size; k += kColumns) {
      for (int r = 0; r < tile.rows; ++r, to += kLine) {
        _mm512_store_si512(to, line_of(from + r * call_.q.token + k, call_.size - k));
      }
    }
  }

  void add_block(int64_t batch, int64_t head, int64_t pair, int64_t key, int64_t panels, Tile& tile) const {
    const int64_t step = tile.rows * kColumns;  // of the scores of a panel
    bool any = false;
    for (int64_t i = 0; i < panels; ++i) {
      float* const scores = tile.scores.get() + i * step;
      if (is_masked(batch, head, key + i * kColumns, tile)) {
        std::fill_n(scores, step, kMasked);
        continue;
      }
      any = true;
      multiply(tile.rows, tile.queries.get(), key_panel(pair, key / kColumns + i), steps_, scores);
    }
    if (!any) return;
    for (int r = 0; r < tile.rows; ++r) {
      const float* const bias = call_.bias.data ? at<float>(call_.bias, batch, head, tile.first + r) + key : nullptr;
      add_scores(r, bias, key, panels, tile);
    }
    alignas(64) float sums[kRows * kColumns];
    for (int64_t i = 0; i < value_panels_; ++i) {
      const char* const values = value_panel(pair, i) + key / 2 * kStepBytes;
      multiply(tile.rows, reinterpret_cast<const char*>(tile.powers.get()), values, panels * kSteps, sums);
      float* const to = tile.sums.get() + i * kRows * kColumns;
      for (int64_t j = 0; j < step; j += kColumns) put(to + j, row<kColumns>(to + j) + row<kColumns>(sums + j));
    }
  }
  // Whether the bias masks all keys of a panel for all queries of a tile.
  bool is_masked(int64_t batch, int64_t head, int64_t key, const Tile& tile) const {
    if (!call_.bias.data) return false;
    const linear::Columns columns{key, std::min<int64_t>(kColumns, call_.keys - key)};
    for (int r = 0; r < tile.rows; ++r) {
      const float* const bias = at<float>(call_.bias, batch, head, tile.first + r);
      const Numbers x = below(columns.count, columns.read(bias));
      const auto masked = [](auto part) { return _mm512_cmp_ps_mask((__m512)part, _mm512_set1_ps(kMasked), _CMP_EQ_OQ); };
      if ((masked(x.parts[0]) & masked(x.parts[1])) != 0xffff) return false;
    }
    return true;
  }

  // Replaces the scores of a query by exponentials in bfloat16, relative to the largest score so far.
  void add_scores(int r, const float* bias, int64_t key, int64_t panels, Tile& tile) const {
    const int64_t end = call_.causal ? std::min(call_.keys, tile.first + r + 1) : call_.keys;
    const int64_t step = tile.rows * kColumns;
    float* const scores = tile.scores.get() + r * kColumns;
    Numbers most = all<Numbers>(kMasked);
    for (int64_t i = 0; i < panels; ++i) {
      const int64_t first = i * kColumns, count = end - key - first;
      Numbers x = row<kColumns>(scores + i * step) * call_.scale;
      if (bias) x = x + linear::Columns{first, std::min<int64_t>(kColumns, call_.keys - key - first)}.read(bias);
      x = below(count, x);
      put(scores + i * step, x);
      most = greater(most, x);
    }
    const float largest = std::max(tile.largest[r], largest_of(most)), base = largest == kMasked ? 0.0f : largest;
    Numbers total{};
    for (int64_t i = 0; i < panels; ++i) {
      const Numbers power = exponential(row<kColumns>(scores + i * step) - base);
      total = total + power;
      linear::put_all(tile.powers.get() + r * kColumns + i * step, power);
    }
    if (key && largest != tile.largest[r]) scale_down(r, std::exp(tile.largest[r] - base), tile);
    tile.largest[r] = largest;
    tile.total[r] += sum_of(total);
  }
  void scale_down(int r, float by, Tile& tile) const {
    tile.total[r] *= by;
    for (int64_t i = 0; i < value_panels_; ++i) {
      float* const sums = tile.sums.get() + (i * kRows + r) * kColumns;
      put(sums, row<kColumns>(sums) * by);
    }
  }

  void write(int64_t batch, int64_t head, const Tile& tile) const {
    for (int r = 0; r < tile.rows; ++r) {
      Out* const to = const_cast<Out*>(at<Out>(call_.y, batch, head, tile.first + r));
      const float share = tile.total[r] == 0 ? 0 : 1 / tile.total[r];
      for (int64_t i = 0; i < value_panels_; ++i) {
        const linear::Columns columns{i * kColumns, std::min<int64_t>(kColumns, call_.value_size - i * kColumns)};
        columns.write(to, row<kColumns>(tile.sums.get() + (i * kRows + r) * kColumns) * share);
      }
    }
  }

  const Call& call_;
  int64_t steps_, key_panels_, value_panels_, key_bytes_, value_bytes_, tiles_;
  std::unique_ptr<char[], Free> keys_, values_;
};

// Attention of few queries: to pack the keys and values would take longer than to multiply them.
template <class In, class Out>
class Unpacked {
 public:
  explicit Unpacked(const Call& call) : call_(call) {}

  static bool serves(const Call& call) { return call.queries == 1 || call.queries * call.heads <= 4 * call.key_heads; }

  ort::Status* run(const ort::Context* context) const {
    const int64_t units = call_.batches * call_.heads * call_.queries, cost = call_.keys * (call_.size + call_.value_size) / 8;
    return spread(context, units, cost, [this](int64_t begin, int64_t end) {
      const auto query = memory<float>(quotient(call_.size, kColumns) * kColumns);
      const auto scores = memory<float>(quotient(call_.keys, kColumns) * kColumns);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t head_of_batch = unit / call_.queries;
        attend(head_of_batch / call_.heads, head_of_batch % call_.heads, unit % call_.queries, query.get(), scores.get());
      }
    });
  }

 private:
  static linear::Columns columns(int64_t first, int64_t end) { return {first, std::min<int64_t>(kColumns, end - first)}; }

  void attend(int64_t batch, int64_t head, int64_t query, float* q, float* scores) const {
    const int64_t key_head = head / (call_.heads / call_.key_heads);
    const int64_t keys = call_.causal ? std::min(call_.keys, query + 1) : call_.keys;
    const In* const from = at<In>(call_.q, batch, head, query);
    for (int64_t i = 0; i < call_.size; i += kColumns) put(q + i, columns(i, call_.size).read(from) * call_.scale);
    const float* const bias = call_.bias.data ? at<float>(call_.bias, batch, head, query) : nullptr;
    each<In>(call_.past_k, call_.past, call_.k, batch, key_head, keys, [&](int64_t key, const In* k) {
      scores[key] = product(q, k) + (bias ? bias[key] : 0);
    });
    const float share = 1 / exponentials(scores, keys);
    Out* const to = const_cast<Out*>(at<Out>(call_.y, batch, head, query));
    for (int64_t i = 0; i < call_.value_size; i += 2 * kColumns) sum_values(scores, keys, batch, key_head, i, share, to);
  }

  LANES_INLINE float product(const float* q, const In* k) const {
    Numbers sum{};
    int64_t i = 0;
    for (; i + kColumns <= call_.size; i += kColumns) sum = sum + row<kColumns>(q + i) * row<kColumns>(k + i);
    if (i < call_.size) sum = sum + row<kColumns>(q + i) * columns(i, call_.size).read(k);
    return sum_of(sum);
  }

  // Replaces scores by exponentials, relative to the largest; returns the sum of these, infinite if all are masked.
  static float exponentials(float* scores, int64_t keys) {
    const int64_t end = quotient(keys, kColumns) * kColumns;
    std::fill(scores + keys, scores + end, kMasked);
    Numbers most = all<Numbers>(kMasked), total{};
    for (int64_t i = 0; i < end; i += kColumns) most = greater(most, row<kColumns>(scores + i));
    const float largest = largest_of(most), base = largest == kMasked ? 0.0f : largest;
    for (int64_t i = 0; i < end; i += kColumns) {
      const Numbers power = exponential(row<kColumns>(scores + i) - base);
      put(scores + i, power);
      total = total + power;
    }
    return largest == kMasked ? std::numeric_limits<float>::infinity() : sum_of(total);
  }

  // Computes up to 64 columns of a result.
  void sum_values(const float* powers, int64_t keys, int64_t batch, int64_t head, int64_t first, float share, Out* to) const {
    const linear::Columns left = columns(first, call_.value_size), right = columns(first + kColumns, call_.value_size);
    Numbers sums[2] = {};
    const auto add = [&](auto visit) { each<In>(call_.past_v, call_.past, call_.v, batch, head, keys, visit); };
    if (right.count == kColumns) {
      add([&](int64_t key, const In* v) {
        sums[0] = sums[0] + row<kColumns>(v + first) * powers[key];
        sums[1] = sums[1] + row<kColumns>(v + first + kColumns) * powers[key];
      });
    } else {
      add([&](int64_t key, const In* v) {
        sums[0] = sums[0] + left.read(v) * powers[key];
        if (right.count > 0) sums[1] = sums[1] + right.read(v) * powers[key];
      });
    }
    left.write(to, sums[0] * share);
    if (right.count > 0) right.write(to, sums[1] * share);
  }

  const Call& call_;
};

template <class In, class Out>
ort::Status* run_as(const ort::Context* context, const Call& call) {
  if (Unpacked<In, Out>::serves(call)) return Unpacked<In, Out>(call).run(context);
  return Product<In, Out>(call).run(context);
}
template <class In>
ort::Status* run_as(const ort::Context* context, const Call& call) {
  if (call.y_type == Type::kFloat) return run_as<In, float>(context, call);
  return run_as<In, bfloat>(context, call);
}
ort::Status* run(const ort::Context* context, const Call& call) {
  if (!call.batches || !call.heads || !call.queries || !call.value_size) return nullptr;
  if (call.x_type == Type::kFloat) return run_as<float>(context, call);
  return run_as<bfloat>(context, call);
}

}  // namespace attention
