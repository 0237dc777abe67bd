// CPU kernels of surefoot: paged attention, fused small operations, sampling.

#include "vectors.hpp"

namespace {

// ------------------------------------------------------------------------------------------------ paged attention

constexpr int TILE = 64;       // cache positions handled at once, on a grid of absolute positions
constexpr int SPAN = 1024;     // positions per work item, on the same grid; partial results are merged in position order
constexpr int QUERIES = 96;    // query heads (rows x heads that share a kv head) per work item
constexpr float NONE = -std::numeric_limits<float>::infinity();

inline V interleave(V a, V b, bool high) {
  I place;
  UNROLL for (int i = 0; i < LANES; ++i) place[i] = i / 2 + (i % 2) * LANES + (high ? LANES / 2 : 0);
#ifdef __clang__
  V v;
  for (int i = 0; i < LANES; ++i) v[i] = i % 2 ? b[place[i] - LANES] : a[place[i]];
  return v;
#else
  return __builtin_shuffle(a, b, place);
#endif
}
// Transposes a LANES x LANES square: log2(LANES) rounds of pairing vector i with vector i + LANES / 2.
inline void transpose(V (&v)[LANES]) {
  UNROLL for (int round = 1; round < LANES; round *= 2) {
    V next[LANES];
    UNROLL for (int i = 0; i < LANES / 2; ++i) {
      next[2 * i] = interleave(v[i], v[i + LANES / 2], false);
      next[2 * i + 1] = interleave(v[i], v[i + LANES / 2], true);
    }
    UNROLL for (int i = 0; i < LANES; ++i) v[i] = next[i];
  }
}

struct Item {  // rows [first, last) of one state slot, one kv head, positions [begin, end)
  int64_t first, last, head, begin, end;
};

inline int64_t round_up(int64_t n, int64_t m) { return (n + m - 1) / m * m; }

Tensor paged_attention(const Tensor& query_, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table_,
                       const Tensor& row_slot_, const Tensor& kv_lens_, int64_t block_size, double scaling,
                       optional<int64_t> window, optional<double> softcap, const optional<Tensor>& sinks_) {
  const Tensor query = query_.contiguous(), block_table = block_table_.contiguous();
  const Tensor row_slot = row_slot_.contiguous(), kv_lens = kv_lens_.contiguous();
  const Tensor sinks = sinks_ ? sinks_->to(at::kFloat).contiguous() : Tensor();
  const int64_t rows = query.size(0), heads = query.size(1), dim = query.size(2);
  const int64_t kv_heads = key_cache.size(1), value_dim = value_cache.size(2), shared = heads / kv_heads;
  TORCH_CHECK(key_cache.size(2) == dim && heads % kv_heads == 0 && value_cache.size(1) == kv_heads,
              "query ", query.sizes(), " does not fit the caches ", key_cache.sizes(), " and ", value_cache.sizes());
  TORCH_CHECK(key_cache.stride(2) == 1 && value_cache.stride(2) == 1, "cache vectors must be contiguous");
  TORCH_CHECK(key_cache.scalar_type() == query.scalar_type() && value_cache.scalar_type() == query.scalar_type(),
              "query and caches must share a dtype");
  TORCH_CHECK(block_table.scalar_type() == at::kInt && row_slot.scalar_type() == at::kLong &&
                  kv_lens.scalar_type() == at::kLong && row_slot.numel() == rows && kv_lens.numel() == rows,
              "block_table is int32, row_slot and kv_lens are int64 [T]");
  Tensor out = at::empty({rows, heads, value_dim}, query.options());
  const int32_t* table = block_table.const_data_ptr<int32_t>();
  const int64_t *slots = row_slot.const_data_ptr<int64_t>(), *lens = kv_lens.const_data_ptr<int64_t>();
  const auto low = [&](int64_t row) { return window ? std::max<int64_t>(0, lens[row] - *window) : 0; };
  TORCH_CHECK(block_table.dim() == 2 && block_size > 0 && (!window || *window > 0),
              "block_table is [S, blocks], block_size and window are positive, got ", block_table.sizes(), ", ", block_size);
  const int64_t states = block_table.size(0), per_state = block_table.size(1);
  const int64_t blocks = std::min(key_cache.size(0), value_cache.size(0)) / block_size;  // in the caches
  for (int64_t row = 0; row < rows; ++row)
    TORCH_CHECK(lens[row] == 0 || (0 <= slots[row] && slots[row] < states && 0 < lens[row] &&
                                   lens[row] <= per_state * block_size),
                "row ", row, " sees ", lens[row], " positions of slot ", slots[row], "; there are ", states, " slots of ",
                per_state * block_size);

  // Neighbouring rows of a state slot share the loading of keys and values; results do not depend on the grouping.
  std::vector<Item> items;
  int64_t spans = 1;
  for (int64_t first = 0, last; first < rows; first = last) {
    const int64_t most = std::max<int64_t>(1, QUERIES / shared);
    int64_t begin = low(first), end = lens[first];
    for (last = first + 1; last < rows && last - first < most && slots[last] == slots[first]; ++last) {
      if (lens[last] == 0 || lens[first] == 0) break;
      begin = std::min(begin, low(last));
      end = std::max(end, lens[last]);
    }
    for (int64_t b = begin / block_size; b * block_size < end; ++b) {
      const int32_t block = table[slots[first] * per_state + b];
      TORCH_CHECK(0 <= block && block < blocks, "slot ", slots[first], " has block ", block, " of ", blocks);
    }
    for (int64_t at = begin / SPAN * SPAN; at < end; at += SPAN)
      for (int64_t head = 0; head < kv_heads; ++head)
        items.push_back({first, last, head, std::max(at, begin), std::min(at + SPAN, end)});
    for (int64_t row = first; row < last; ++row)
      if (lens[row]) spans = std::max(spans, (lens[row] - 1) / SPAN - low(row) / SPAN + 1);
  }

  // Partial results per row, query head and span: maximum, sum of weights, weighted values.
  const int64_t width = round_up(value_dim, PANEL), record = width + 2;
  std::vector<float> partial(rows * heads * spans * record);
  const auto at_span = [&](int64_t row, int64_t head, int64_t span) {
    return partial.data() + ((row * heads + head) * spans + span - low(row) / SPAN) * record;
  };
  int64_t queries = 0;  // query heads of the largest item
  for (const Item& item : items) queries = std::max(queries, (item.last - item.first) * shared);
  Team team((int64_t)items.size(), std::numeric_limits<int64_t>::max());

  with_dtype(query, [&](auto* q) {
    using T = std::remove_pointer_t<decltype(q)>;
    const T *keys = (const T*)key_cache.const_data_ptr(), *values = (const T*)value_cache.const_data_ptr();
#pragma omp parallel num_threads(team.size())
    {
      // Kept from call to call and never cleared: what is read was written for the same item, but for columns that are never looked at.
      static thread_local std::vector<float> memory;
      const size_t needed = queries * (dim + TILE + width + 2) + TILE * (dim + width);
      if (memory.size() < needed) memory.resize(needed);
      float* const widened = memory.data();
      float *const key_tile = widened + queries * dim, *const value_tile = key_tile + dim * TILE;
      float *const weight = value_tile + TILE * width, *const acc = weight + queries * TILE;
      float *const peak = acc + queries * width, *const total = peak + queries;
#pragma omp for schedule(dynamic) nowait
      for (size_t which = 0; which < items.size(); ++which) {
        const Item item = items[which];
        const int64_t count = (item.last - item.first) * shared;  // query heads of this item, ordered (row, head)
        const int64_t parts = (count + MAX_ROWS - 1) / MAX_ROWS;
        for (int64_t i = 0; i < count; ++i) {
          const T* from = q + ((item.first + i / shared) * heads + item.head * shared + i % shared) * dim;
          std::copy(from, from + dim, &widened[i * dim]);
        }
        std::fill_n(acc, count * width, 0.f);
        std::fill_n(peak, count, NONE);
        std::fill_n(total, count, 0.f);
        const int32_t* blocks = table + slots[item.first] * block_table.size(1);

        for (int64_t tile = item.begin / TILE * TILE; tile < item.end; tile += TILE) {
          const int64_t begin = std::max(item.begin, tile) - tile, end = std::min(item.end, tile + TILE) - tile;
          const int64_t left = begin / LANES * LANES, right = round_up(end, LANES);  // whole vectors of columns
          const T *key_row[TILE], *value_row[TILE];
          int64_t block = (tile + begin) / block_size, offset = (tile + begin) % block_size;
          for (int64_t c = begin; c < end; ++c, ++offset) {
            if (offset == block_size) offset = 0, ++block;
            const int64_t slot = blocks[block] * block_size + offset;
            key_row[c] = keys + slot * key_cache.stride(0) + item.head * key_cache.stride(1);
            value_row[c] = values + slot * value_cache.stride(0) + item.head * value_cache.stride(1);
          }
          std::fill(key_row + left, key_row + begin, key_row[begin]);  // scores there are never looked at
          std::fill(key_row + end, key_row + right, key_row[begin]);
          for (int64_t c = left; c < right; c += LANES)
            for (int64_t d = 0; d < dim; d += LANES) {
              V square[LANES];
              UNROLL for (int j = 0; j < LANES; ++j) square[j] = read(key_row[c + j] + d, dim - d);
              transpose(square);
              for (int64_t j = 0; j < std::min<int64_t>(LANES, dim - d); ++j) store(&key_tile[(d + j) * TILE + c], square[j]);
            }
          for (int64_t c = begin; c < end; ++c)
            for (int64_t d = 0; d < value_dim; d += LANES)
              store(&value_tile[c * width + d], read(value_row[c] + d, value_dim - d));

          for (int64_t part = 0; part < parts; ++part) {
            const int64_t batch = count * part / parts, next = count * (part + 1) / parts;  // evenly sized
            with_rows((int)(next - batch), [&](auto r) {
              constexpr int R = decltype(r)::value;
              float* w = &weight[batch * TILE];
              for (int64_t c = begin / PANEL * PANEL; c < end; c += PANEL) {
                for (int i = 0; i < R; ++i) std::memset(w + i * TILE + c, 0, PANEL * sizeof(float));
                multiply<R>(StridedF32<TILE>(&key_tile[c]), &widened[batch * dim], dim, w + c, TILE, 0, dim);
              }
              int64_t from[R], to[R], all_from = 0, all_to = TILE;  // columns each row sees, and those all of them see
              for (int i = 0; i < R; ++i) {
                const int64_t row = item.first + (batch + i) / shared, index = batch + i;
                from[i] = std::max(begin, low(row) - tile);
                to[i] = std::max(from[i], std::min(end, lens[row] - tile));
                all_from = std::max(all_from, from[i]);
                all_to = std::min(all_to, to[i]);
                if (from[i] == to[i]) continue;
                const int64_t first_vector = from[i] / LANES * LANES;
                V best = splat(NONE);
                for (int64_t c = first_vector; c < to[i]; c += LANES) {
                  V s = load<V>(w + i * TILE + c) * splat((float)scaling);
                  if (softcap) s = hyperbolic_tangent(s / splat((float)*softcap)) * splat((float)*softcap);
                  const I column = lane_index() + (int)c;
                  s = (column >= (int)from[i]) & (column < (int)to[i]) ? s : splat(NONE);
                  best = maximum(best, s);
                  store(w + i * TILE + c, s);
                }
                const float before = peak[index], now = std::max(before, top(best));
                if (now == NONE) {  // every score was -inf: nothing to add, and -inf - -inf must not be formed
                  to[i] = from[i];
                  all_to = std::min(all_to, to[i]);
                  continue;
                }
                V mass{};
                for (int64_t c = first_vector; c < to[i]; c += LANES) {
                  const V p = exponential(load<V>(w + i * TILE + c) - splat(now));
                  mass += p;
                  store(w + i * TILE + c, p);
                }
                if (now != before) {
                  const V factor = exponential(splat(before - now));
                  total[index] *= factor[0];
                  for (int64_t d = 0; d < width; d += LANES) {
                    float* a = &acc[index * width + d];
                    store(a, load<V>(a) * factor);
                  }
                }
                total[index] += sum(mass);
                peak[index] = now;
              }
              if (all_from >= all_to) all_from = all_to = TILE;  // nothing in common: every row alone
              for (int64_t d = 0; d < width; d += PANEL) {
                const RowF32 v(&value_tile[d], width);
                float* a = &acc[batch * width + d];
                const auto alone = [&](int i, int64_t first, int64_t last) {
                  if (first < last) multiply<1>(v, w + i * TILE, TILE, a + i * width, width, first, last);
                };
                for (int i = 0; i < R; ++i) alone(i, from[i], std::min(to[i], all_from));
                if (all_from < all_to) multiply<R>(v, w, TILE, a, width, all_from, all_to);
                for (int i = 0; i < R; ++i) alone(i, std::max(from[i], all_to), to[i]);
              }
            });
          }
        }
        for (int64_t i = 0; i < count; ++i) {
          const int64_t row = item.first + i / shared, span = item.begin / SPAN;
          if (low(row) >= item.end || lens[row] <= item.begin) continue;  // the row sees nothing of this span
          float* p = at_span(row, item.head * shared + i % shared, span);
          p[0] = peak[i];
          p[1] = total[i];
          std::memcpy(p + 2, &acc[i * width], width * sizeof(float));
        }
      }
      team.done();
#pragma omp barrier
#pragma omp for schedule(static)
      for (int64_t i = 0; i < rows * heads; ++i) {
        const int64_t row = i / heads, head = i % heads;
        T* to = (T*)out.mutable_data_ptr() + i * value_dim;
        const int64_t used = lens[row] ? (lens[row] - 1) / SPAN - low(row) / SPAN + 1 : 0;
        const float* records = partial.data() + i * spans * record;
        float highest = sinks.defined() && used ? sinks.const_data_ptr<float>()[head] : NONE, mass = 0;
        const float sink = highest;
        for (int64_t s = 0; s < used; ++s) highest = std::max(highest, records[s * record]);
        if (sink != NONE) mass = std::exp(sink - highest);
        for (int64_t s = 0; s < used; ++s)
          if (records[s * record] != NONE) mass += std::exp(records[s * record] - highest) * records[s * record + 1];
        for (int64_t d = 0; d < value_dim; d += LANES) {
          V v{};
          for (int64_t s = 0; s < used; ++s)
            if (records[s * record] != NONE)
              v = fma(splat(std::exp(records[s * record] - highest)), load<V>(records + s * record + 2 + d), v);
          write(to + d, mass > 0 ? v / splat(mass) : V{}, value_dim - d);
        }
      }
    }
  });
  return out;
}

// ------------------------------------------------------------------------------------------------ small operations

// RMSNorm over the last dimension. `unit_offset` false: weight * round(x / rms) (Llama, Qwen); true: round(x / rms *
// (1 + weight)) in float32 (Gemma). With `residual`, x + residual (rounded to the dtype) is normalised and returned too.
std::tuple<Tensor, Tensor> rms_norm(const Tensor& x_, const Tensor& weight_, double eps, bool unit_offset,
                                    const optional<Tensor>& residual_) {
  const Tensor x = x_.contiguous(), weight = weight_.contiguous();
  const Tensor residual = residual_ ? residual_->contiguous() : Tensor();
  const int64_t size = x.size(-1), rows = size ? x.numel() / size : 0;
  TORCH_CHECK(weight.numel() == size && weight.scalar_type() == x.scalar_type(), "weight is [", size, "] in x's dtype");
  TORCH_CHECK(!residual_ || (residual.sizes() == x.sizes() && residual.scalar_type() == x.scalar_type()),
              "residual has x's shape and dtype");
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor total = residual_ ? at::empty(x.sizes(), x.options()) : at::empty({0}, x.options());
  with_dtype(y, [&](auto* to_all) {
    using T = std::remove_pointer_t<decltype(to_all)>;
    const T *from_all = (const T*)x.const_data_ptr(), *w = (const T*)weight.const_data_ptr();
    const T* other_all = residual_ ? (const T*)residual.const_data_ptr() : nullptr;
    T* total_all = residual_ ? (T*)total.mutable_data_ptr() : nullptr;
    split(rows, rows * size, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const T* from = from_all + row * size;
        V squares{};
        for (int64_t i = 0; i < size; i += LANES) {
          V v = read(from + i, size - i);
          if (other_all) {
            v = rounded(from, v + read(other_all + row * size + i, size - i));
            write(total_all + row * size + i, v, size - i);
          }
          squares = fma(v, v, squares);
        }
        if (total_all) from = total_all + row * size;
        const V scale = splat(1.f / std::sqrt(sum(squares) / (float)size + (float)eps));
        for (int64_t i = 0; i < size; i += LANES) {
          const V normed = read(from + i, size - i) * scale, g = read(w + i, size - i);
          write(to_all + row * size + i, unit_offset ? normed * (splat(1.f) + g) : g * rounded(from, normed), size - i);
        }
      }
    });
  });
  return {y, total};
}

// x * cos + rotate_half(x) * sin on the first cos.size(-1) features of each head, each product rounded to the dtype as the
// unfused expression rounds it. x: [T, H, D] with any strides over T and H; cos, sin: [T, R].
Tensor rotary(const Tensor& x_, const Tensor& cos_, const Tensor& sin_) {
  const Tensor x = x_.stride(-1) == 1 ? x_ : x_.contiguous(), cos = cos_.contiguous(), sin = sin_.contiguous();
  const int64_t rows = x.size(0), heads = x.size(1), dim = x.size(2), rotated = cos.size(-1), half = rotated / 2;
  TORCH_CHECK(cos.dim() == 2 && cos.sizes() == sin.sizes() && cos.size(0) == rows && rotated <= dim && rotated % 2 == 0,
              "cos and sin are [", rows, ", R] with an even R <= ", dim);
  TORCH_CHECK(cos.scalar_type() == x.scalar_type() && sin.scalar_type() == x.scalar_type(), "cos and sin have x's dtype");
  Tensor y = at::empty({rows, heads, dim}, x.options());
  with_dtype(y, [&](auto* to_all) {
    using T = std::remove_pointer_t<decltype(to_all)>;
    const T *c = (const T*)cos.const_data_ptr(), *s = (const T*)sin.const_data_ptr();
    split(rows, rows * heads * dim, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row)
        for (int64_t head = 0; head < heads; ++head) {
          const T* from = (const T*)x.const_data_ptr() + row * x.stride(0) + head * x.stride(1);
          T* to = to_all + (row * heads + head) * dim;
          for (int64_t i = 0; i < half; i += LANES) {
            const int64_t n = half - i, a = row * rotated + i, b = a + half;
            const V lo = read(from + i, n), hi = read(from + half + i, n);
            write(to + i, rounded(to, lo * read(c + a, n)) + rounded(to, -hi * read(s + a, n)), n);
            write(to + half + i, rounded(to, hi * read(c + b, n)) + rounded(to, lo * read(s + b, n)), n);
          }
          for (int64_t i = rotated; i < dim; ++i) to[i] = from[i];
        }
    });
  });
  return y;
}

// act(gate) * up for gate_up = [..., gate | up]; act(gate) is rounded to the dtype first, as the unfused product does.
Tensor gated_activation(const Tensor& gate_up_, bool gelu) {
  const Tensor gate_up = gate_up_.contiguous();
  TORCH_CHECK(gate_up.size(-1) % 2 == 0, "gate and up must have the same width");
  const int64_t size = gate_up.size(-1) / 2, rows = size ? gate_up.numel() / size / 2 : 0;
  auto shape = gate_up.sizes().vec();
  shape.back() = size;
  Tensor y = at::empty(shape, gate_up.options());
  with_dtype(y, [&](auto* to) {
    const auto* from = (decltype(to))gate_up.const_data_ptr();
    const int64_t pieces = (size + LANES - 1) / LANES;
    split(rows * pieces, rows * size * 4, [&](int64_t first, int64_t last) {
      int64_t row = first / pieces, i = first % pieces * LANES;
      for (int64_t piece = first; piece < last; ++piece, i += LANES) {
        if (i >= size) i = 0, ++row;
        const int64_t n = size - i;
        const V x = read(from + row * 2 * size + i, n), up = read(from + row * 2 * size + size + i, n);
        V y;
        if (gelu) {
          const V inner = splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x);
          y = splat(0.5f) * x * (splat(1.f) + hyperbolic_tangent(inner));
        } else {
          y = x / (splat(1.f) + exponential(-x));
        }
        write(to + row * size + i, rounded(to, y) * up, n);
      }
    });
  });
  return y;
}

// ------------------------------------------------------------------------------------------------ sampling

constexpr int64_t BLOCK = 4096;  // entries summed on their own; block sums are added in order, whatever the thread count

// Largest entry of [begin, end) and whether all of them are below infinity: a comparison with NaN is false, which a maximum
// that skips NaN would not notice.
template <class T>
std::pair<float, bool> peak_of(const T* row, int64_t begin, int64_t end) {
  V best = splat(NONE);
  const V limit = splat(-NONE);
  I sound = ~I{};
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    const V x = read(row + i);
    best = maximum(best, x);
    sound &= x < limit;
  }
  float peak = top(best);
  bool all = true;
  for (int lane = 0; lane < LANES; ++lane) all &= sound[lane] != 0;
  for (; i < end; ++i) {
    const float x = (float)row[i];
    peak = std::max(peak, x);
    all &= x < -NONE;
  }
  return {peak, all};
}

// probs[L, V] float32 = softmax(logits / temperature); temperature 0 gives the point mass on the first maximum. Rows that hold
// NaN or infinity, or nothing above -infinity, are all zeros.
Tensor softmax_rows(const Tensor& logits_, const Tensor& temperature_) {
  const Tensor logits = logits_.contiguous(), temperature = temperature_.to(at::kFloat).contiguous();
  const int64_t rows = logits.size(0), size = logits.size(1), blocks = (size + BLOCK - 1) / BLOCK;
  TORCH_CHECK(temperature.numel() == rows, "temperature is [", rows, "]");
  Tensor probs = at::empty({rows, size}, logits.options().dtype(at::kFloat));
  float* to = probs.mutable_data_ptr<float>();
  const float* temperatures = temperature.const_data_ptr<float>();
  std::vector<float> peak(rows * blocks), scale(rows);
  std::vector<char> sound_block(rows * blocks);
  std::vector<double> mass(rows * blocks);
  with_dtype(logits, [&](auto* from) {
    const auto each_block = [&](auto f) {
      split(rows * blocks, rows * size, [&](int64_t first, int64_t last) {
        for (int64_t b = first; b < last; ++b) f(b, b / blocks, b % blocks * BLOCK, std::min(size, (b % blocks + 1) * BLOCK));
      });
    };
    each_block([&](int64_t b, int64_t row, int64_t begin, int64_t end) {
      const auto [highest, sound] = peak_of(from + row * size, begin, end);
      peak[b] = highest, sound_block[b] = sound;
    });
    for (int64_t row = 0; row < rows; ++row) {
      bool sound = true;
      for (int64_t b = 0; b < blocks; ++b) {
        peak[row * blocks] = std::max(peak[row * blocks], peak[row * blocks + b]);
        sound &= sound_block[row * blocks + b] != 0;
      }
      if (!sound) peak[row * blocks] = NONE;
    }
    each_block([&](int64_t b, int64_t row, int64_t begin, int64_t end) {
      const float highest = peak[row * blocks];
      if (highest == NONE) {
        std::fill(to + row * size + begin, to + row * size + end, 0.f);
        return;
      }
      const V inverse = splat(1.f / temperatures[row]);
      V lanes{};
      for (int64_t i = begin; i < end; i += LANES) {
        const V x = read(from + row * size + i, end - i);
        V p = temperatures[row] > 0 ? exponential((x - splat(highest)) * inverse) : (x == splat(highest) ? splat(1.f) : V{});
        if (end - i < LANES) p = lane_index() < (int)(end - i) ? p : V{};
        lanes += p;
        write(to + row * size + i, p, end - i);
      }
      mass[b] = sum(lanes);
    });
    for (int64_t row = 0; row < rows; ++row) {
      if (peak[row * blocks] == NONE) continue;
      double all = 0;
      for (int64_t b = 0; b < blocks; ++b) all += mass[row * blocks + b];
      scale[row] = (float)(1 / all);
      if (temperatures[row] > 0 || all == 1) continue;
      for (int64_t i = 0, seen = 0; i < size; ++i) {  // several maxima: the first one keeps everything
        float& p = to[row * size + i];
        if (p > 0 && seen++) p = 0;
      }
      scale[row] = 1;
    }
    each_block([&](int64_t, int64_t row, int64_t begin, int64_t end) {  // zeros stay zeros: scale is 0 there
      for (int64_t i = begin; i < end; ++i) to[row * size + i] *= scale[row];
    });
  });
  return probs;
}

// First index of the largest logit of every row: [L, V] -> [L] int64; -1 for a row that holds NaN or infinity, or nothing above
// -infinity.
Tensor argmax_rows(const Tensor& logits_) {
  const Tensor logits = logits_.contiguous();
  const int64_t rows = logits.size(0), size = logits.size(1), blocks = (size + BLOCK - 1) / BLOCK;
  Tensor index = at::empty({rows}, logits.options().dtype(at::kLong));
  int64_t* to = index.mutable_data_ptr<int64_t>();
  std::vector<float> peak(rows * blocks);
  std::vector<char> sound(rows * blocks);
  with_dtype(logits, [&](auto* from) {
    split(rows * blocks, rows * size, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) {
        const int64_t begin = b % blocks * BLOCK, end = std::min(size, begin + BLOCK);
        const auto [highest, all] = peak_of(from + b / blocks * size, begin, end);
        peak[b] = highest, sound[b] = all;
      }
    });
    for (int64_t r = 0; r < rows; ++r) {
      const float* peaks = peak.data() + r * blocks;
      const int64_t block = std::max_element(peaks, peaks + blocks) - peaks;  // the first of equals
      to[r] = -1;
      if (peaks[block] == NONE || !std::all_of(sound.data() + r * blocks, sound.data() + (r + 1) * blocks, [](char s) { return s; }))
        continue;
      for (int64_t i = block * BLOCK; i < std::min(size, (block + 1) * BLOCK); ++i)
        if ((float)from[r * size + i] == peaks[block]) {
          to[r] = i;
          break;
        }
    }
  });
  return index;
}

// First index whose cumulative probability exceeds u * total, sums in float64 and in index order; -1 for a row without mass.
Tensor sample_rows(const Tensor& probs_, const Tensor& uniforms_) {
  const Tensor probs = probs_.contiguous(), uniforms = uniforms_.to(at::kDouble).contiguous();
  TORCH_CHECK(probs.scalar_type() == at::kFloat && probs.dim() == 2 && uniforms.numel() == probs.size(0),
              "probs is float32 [N, V], uniforms [N]");
  const int64_t rows = probs.size(0), size = probs.size(1), blocks = (size + BLOCK - 1) / BLOCK;
  Tensor index = at::empty({rows}, probs.options().dtype(at::kLong));
  const float* p = probs.const_data_ptr<float>();
  std::vector<double> mass(rows * blocks);
  split(rows * blocks, rows * size, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const int64_t row = b / blocks, begin = b % blocks * BLOCK, end = std::min(size, begin + BLOCK);
      double part[8] = {};
      int64_t i = begin;
      for (; i + 8 <= end; i += 8)
        UNROLL for (int j = 0; j < 8; ++j) part[j] += p[row * size + i + j];
      for (; i < end; ++i) part[0] += p[row * size + i];
      mass[b] = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    double total = 0, before = 0;
    for (int64_t b = 0; b < blocks; ++b) total += mass[row * blocks + b];
    const double goal = uniforms.const_data_ptr<double>()[row] * total;
    int64_t b = 0, chosen = -1;
    for (; b + 1 < blocks && before + mass[row * blocks + b] <= goal; ++b) before += mass[row * blocks + b];
    for (int64_t i = b * BLOCK; i < size; ++i) {  // the last positive entry stands in where rounding leaves the goal unmet
      const float here = p[row * size + i];
      if (here > 0) chosen = i;
      if ((before += here) > goal) break;
    }
    for (int64_t i = b * BLOCK - 1; chosen < 0 && i >= 0; --i)
      if (p[row * size + i] > 0) chosen = i;
    index.mutable_data_ptr<int64_t>()[row] = chosen;
  }
  return index;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(surefoot, m) {
  m.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor row_slot, "
      "Tensor kv_lens, int block_size, float scaling, int? window, float? softcap, Tensor? sinks) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, bool unit_offset, Tensor? residual) -> (Tensor, Tensor)");
  m.def("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor");
  m.def("gated_activation(Tensor gate_up, bool gelu) -> Tensor");
  m.def("softmax_rows(Tensor logits, Tensor temperature) -> Tensor");
  m.def("argmax_rows(Tensor logits) -> Tensor");
  m.def("sample_rows(Tensor probs, Tensor uniforms) -> Tensor");
}

TORCH_LIBRARY_IMPL(surefoot, CPU, m) {
  m.impl("paged_attention", &paged_attention);
  m.impl("rms_norm", &rms_norm);
  m.impl("rotary", &rotary);
  m.impl("gated_activation", &gated_activation);
  m.impl("softmax_rows", &softmax_rows);
  m.impl("argmax_rows", &argmax_rows);
  m.impl("sample_rows", &sample_rows);
}
