// CPU kernels of surefoot: thin matrix products, paged attention, fused small operations, sampling.
//
// One rule holds everywhere: a row's result is computed in an order that depends on that row alone (its length, its
// position), never on how many rows there are, where the row stands, or how many threads run. Greedy decoding with and
// without speculation then agrees bit for bit without luck. Fused multiply-adds are written out (`fma`) and the file is
// compiled with -ffp-contract=off, so that no template instance may round differently from another.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <omp.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

using at::BFloat16;
using at::Tensor;
using c10::optional;

// ------------------------------------------------------------------------------------------------ vectors

// LANES floats make a vector, two vectors a weight panel; MAX_ROWS rows of accumulators (two vectors each) still fit into
// the registers: AVX-512 and NEON have 32, AVX2 has 16.
#if defined(__AVX512F__)
constexpr int LANES = 16, MAX_ROWS = 8;
#elif defined(__AVX2__)
constexpr int LANES = 8, MAX_ROWS = 6;
#else
constexpr int LANES = 4, MAX_ROWS = 6;
#endif
constexpr int PANEL = 2 * LANES;

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t H __attribute__((vector_size(2 * LANES)));
typedef int8_t B __attribute__((vector_size(LANES)));

#define UNROLL _Pragma("GCC unroll 16")

template <class R>
inline R load(const void* p) {
  R r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
template <class R>
inline void store(void* p, R r) {
  std::memcpy(p, &r, sizeof r);
}
inline V splat(float x) { return x - V{}; }

inline V fma(V a, V b, V c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

inline V root(V x) {
  UNROLL for (int i = 0; i < LANES; ++i) x[i] = std::sqrt(x[i]);
  return x;
}
inline V maximum(V a, V b) { return a > b ? a : b; }
inline float sum(V v) {  // pairwise, always the same tree
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  return v[0];
}
inline float top(V v) {
  float best = v[0];
  for (int i = 1; i < LANES; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

inline I lane_index() {
  I index;
  UNROLL for (int i = 0; i < LANES; ++i) index[i] = i;
  return index;
}

// exp(x) = 2^n e^r with |r| <= ln2/2, e^r by its Taylor polynomial (truncation 5e-9 relative). 2^n goes on in two halves so
// that the whole range, denormals included, comes out; -inf gives 0.
inline V exponential(V x) {
  const V shift = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  V clamped = maximum(splat(-110.f), x < splat(90.f) ? x : splat(90.f));
  V biased = fma(clamped, splat(1.44269504f), shift);
  V n = biased - shift;
  V r = fma(n, splat(-0.693145752f), clamped);
  r = fma(n, splat(-1.42860677e-6f), r);
  V p = splat(1.f / 5040);
  p = fma(p, r, splat(1.f / 720));
  p = fma(p, r, splat(1.f / 120));
  p = fma(p, r, splat(1.f / 24));
  p = fma(p, r, splat(1.f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.f));
  p = fma(p, r, splat(1.f));
  I whole = __builtin_convertvector(n, I), half = whole >> 1;
  p = p * (V)((half + 127) << 23) * (V)((whole - half + 127) << 23);
  return x < splat(-104.f) ? V{} : p;
}
inline V hyperbolic_tangent(V x) {  // on |x|: near 1, where gelu's tail cancels, the result is then rounded correctly
  const V size = (V)((U)x & 0x7fffffffu), t = splat(1.f) - splat(2.f) / (exponential(size + size) + splat(1.f));
  return x < V{} ? -t : t;
}

inline V widen(H h) {
#if defined(__AVX512F__)
  return (V)((U)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#elif defined(__AVX2__)
  return (V)((U)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#else
  return (V)(__builtin_convertvector(h, U) << 16);
#endif
}
inline H narrow(V v) {  // round to nearest even, NaN kept
  U bits = (U)v;
  U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(v == v ? rounded : U{} + 0x7fc0, H);
}

// A vector of up to LANES elements of a bfloat16 or float row (missing ones read as 0), and back.
inline V read(const float* p, int64_t n = LANES) {
  if (n >= LANES) return load<V>(p);
  V v{};
  for (int64_t i = 0; i < n; ++i) v[i] = p[i];
  return v;
}
inline V read(const BFloat16* p, int64_t n = LANES) {
  if (n >= LANES) return widen(load<H>(p));
  H h{};
  for (int64_t i = 0; i < n; ++i) h[i] = p[i].x;
  return widen(h);
}
inline void write(float* p, V v, int64_t n = LANES) {
  if (n >= LANES) return store(p, v);
  for (int64_t i = 0; i < n; ++i) p[i] = v[i];
}
inline void write(BFloat16* p, V v, int64_t n = LANES) {
  H h = narrow(v);
  if (n >= LANES) return store(p, h);
  for (int64_t i = 0; i < n; ++i) p[i].x = h[i];
}
inline V rounded(const float*, V v) { return v; }
inline V rounded(const BFloat16*, V v) { return widen(narrow(v)); }

template <class F>
void with_dtype(const Tensor& t, F f) {
  if (t.scalar_type() == at::kBFloat16)
    f((BFloat16*)t.mutable_data_ptr());
  else if (t.scalar_type() == at::kFloat)
    f((float*)t.mutable_data_ptr());
  else
    TORCH_CHECK(false, "surefoot kernels take bfloat16 or float32, got ", t.scalar_type());
}

// f(begin, end) over [0, n) in `threads` contiguous parts; small work stays on the calling thread.
template <class F>
void split(int64_t n, int64_t work, F f) {
  const int threads = work < 32768 ? 1 : (int)std::min<int64_t>(at::get_num_threads(), std::max<int64_t>(n, 1));
  if (threads == 1) return f((int64_t)0, n);
#pragma omp parallel num_threads(threads)
  {
    int64_t t = omp_get_thread_num(), count = omp_get_num_threads();
    f(n * t / count, n * (t + 1) / count);
  }
}

// ------------------------------------------------------------------------------------------------ matrix products

// One input's worth of a weight panel as two float vectors: outputs 0..LANES-1 and LANES..PANEL-1.
struct Bf16Panel {  // each 32-bit word holds output j in its low half and j + LANES in its high half
  using Element = uint16_t;
  const uint16_t* w;
  void get(int64_t k, V& lo, V& hi) const {
    U u = load<U>(w + k * PANEL);
    lo = (V)(u << 16);
    hi = (V)(u & 0xffff0000u);
  }
};
template <int STRIDE>
struct StridedF32 {
  using Element = float;
  const float* w;
  void get(int64_t k, V& lo, V& hi) const {
    lo = load<V>(w + k * STRIDE);
    hi = load<V>(w + k * STRIDE + LANES);
  }
};
using F32Panel = StridedF32<PANEL>;
struct RowF32 {  // rows of a stride known only at run time
  using Element = float;
  const float* w;
  int64_t stride;
  void get(int64_t k, V& lo, V& hi) const {
    lo = load<V>(w + k * stride);
    hi = load<V>(w + k * stride + LANES);
  }
};
struct Int8Panel {
  using Element = int8_t;
  const int8_t* w;
  static V widen(const int8_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    return __builtin_convertvector(__builtin_convertvector(load<B>(p), I), V);
#endif
  }
  void get(int64_t k, V& lo, V& hi) const {
    lo = widen(w + k * PANEL);
    hi = widen(w + k * PANEL + LANES);
  }
};

// acc[r][0..PANEL) += sum over k in [first, last) of x[r][k] * w[k][0..PANEL), k strictly ascending for every output.
// On the way, `step` bytes per k are fetched into the cache from `ahead` on.
template <int R, class W>
inline __attribute__((always_inline)) void multiply(W w, const float* x, int64_t x_stride, float* acc, int64_t acc_stride,
                                                    int64_t first, int64_t last, const char* ahead, int64_t step) {
  V a[R][2];
  UNROLL for (int r = 0; r < R; ++r) {
    a[r][0] = load<V>(acc + r * acc_stride);
    a[r][1] = load<V>(acc + r * acc_stride + LANES);
  }
  for (int64_t k = first; k < last; ++k) {
    V lo, hi;
    w.get(k, lo, hi);
    if (ahead) __builtin_prefetch(ahead + (k - first) * step);
    UNROLL for (int r = 0; r < R; ++r) {
      V b = splat(x[r * x_stride + k]);
      a[r][0] = fma(b, lo, a[r][0]);
      a[r][1] = fma(b, hi, a[r][1]);
    }
  }
  UNROLL for (int r = 0; r < R; ++r) {
    store(acc + r * acc_stride, a[r][0]);
    store(acc + r * acc_stride + LANES, a[r][1]);
  }
}

// Calls f(integral_constant<int, rows>) for a run-time 1 <= rows <= MAX_ROWS.
template <class F, int R = MAX_ROWS>
inline void with_rows(int rows, F f) {
  if (rows == R)
    f(std::integral_constant<int, R>());
  else if constexpr (R > 1)
    with_rows<F, R - 1>(rows, f);
}

constexpr int64_t K_CHUNK = 256;   // inputs of a panel handled for all rows before moving on: stays in the L1 cache
constexpr int64_t ROW_BLOCK = 48;  // rows per reading of the weights: far more arithmetic than the reading hides

// Computes x W^T panel by panel and hands every finished row of a panel to emit(thread, row, panel, float[PANEL]).
template <class W, class X, class Emit>
void product(const X* x, int64_t rows, int64_t depth, const typename W::Element* w, int64_t panels, Emit emit) {
  const int64_t stride = (depth + 63) / 64 * 64 + 16;  // rows do not fall into the same cache sets
  std::vector<float> widened(std::min(rows, ROW_BLOCK) * stride);
  for (int64_t block = 0; block < rows; block += ROW_BLOCK) {
    const int64_t here = std::min(ROW_BLOCK, rows - block), groups = (here + MAX_ROWS - 1) / MAX_ROWS;
    split(here, here * depth / 8, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r)
        for (int64_t k = 0; k < depth; k += LANES)
          store(&widened[r * stride + k], read(x + (block + r) * depth + k, depth - k));
    });
    split(panels, here * depth * panels, [&](int64_t first_panel, int64_t last_panel) {
      float acc[ROW_BLOCK * PANEL];
      for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        const W weights{w + panel * depth * PANEL};
        std::memset(acc, 0, here * PANEL * sizeof(float));
        for (int64_t k = 0; k < depth; k += K_CHUNK)
          for (int64_t g = 0; g < groups; ++g) {  // evenly sized; each fetches its share of the next chunk
            const int64_t first = here * g / groups, size = here * (g + 1) / groups - first;
            const int64_t step = std::max<int64_t>(1, PANEL * sizeof(typename W::Element) / groups);
            const char* ahead = (const char*)(weights.w + (k + K_CHUNK) * PANEL) + g * K_CHUNK * step;
            with_rows((int)size, [&](auto r) {
              multiply<decltype(r)::value>(weights, &widened[first * stride], stride, acc + first * PANEL, PANEL, k,
                                           std::min(depth, k + K_CHUNK), ahead, step);
            });
          }
        for (int64_t r = 0; r < here; ++r) emit(omp_get_thread_num(), block + r, panel, acc + r * PANEL);
      }
    });
  }
}

// Chooses the panel type by the dtype of the packed weight: [panels, depth, PANEL] int16 (bfloat16 bits), float32 or int8.
template <class F>
void with_panels(const Tensor& packed, F f) {
  TORCH_CHECK(packed.dim() == 3 && packed.size(2) == PANEL && packed.is_contiguous(), "weight was not packed by pack()");
  if (packed.scalar_type() == at::kShort)
    f(Bf16Panel{(const uint16_t*)packed.const_data_ptr()});
  else if (packed.scalar_type() == at::kFloat)
    f(F32Panel{(const float*)packed.const_data_ptr()});
  else if (packed.scalar_type() == at::kChar)
    f(Int8Panel{(const int8_t*)packed.const_data_ptr()});
  else
    TORCH_CHECK(false, "packed weight has dtype ", packed.scalar_type());
}

// [N, K] bfloat16, float32 or int8 -> [panels, K, PANEL]; the last panel is padded with zeros.
Tensor pack(const Tensor& weight_) {
  const Tensor weight = weight_.contiguous();
  const int64_t outputs = weight.size(0), depth = weight.size(1), panels = (outputs + PANEL - 1) / PANEL;
  const bool half = weight.scalar_type() == at::kBFloat16;
  const auto dtype = half ? at::kShort : weight.scalar_type();
  Tensor packed = at::empty({panels, depth, PANEL}, weight.options().dtype(dtype));
#ifdef __linux__
  const uintptr_t page = 4096, begin = ((uintptr_t)packed.data_ptr() + page - 1) / page * page;
  const uintptr_t end = ((uintptr_t)packed.data_ptr() + packed.nbytes()) / page * page;
  if (end > begin) madvise((void*)begin, end - begin, MADV_HUGEPAGE);  // a wish: fewer TLB misses where it is granted
#endif
  const auto interleave = [&](auto* from, auto* to) {
    split(panels, panels * depth * PANEL, [&](int64_t first, int64_t last) {  // first touch by the thread that will read
      for (int64_t p = first; p < last; ++p)
        for (int j = 0; j < PANEL; ++j) {
          const int64_t n = p * PANEL + j;
          const int place = half ? (j % LANES) * 2 + j / LANES : j;
          for (int64_t k = 0; k < depth; ++k)
            to[(p * depth + k) * PANEL + place] = n < outputs ? from[n * depth + k] : 0;
        }
    });
  };
  if (half)
    interleave((const int16_t*)weight.const_data_ptr(), (int16_t*)packed.mutable_data_ptr());
  else if (dtype == at::kFloat)
    interleave((const float*)weight.const_data_ptr(), (float*)packed.mutable_data_ptr());
  else if (dtype == at::kChar)
    interleave((const int8_t*)weight.const_data_ptr(), (int8_t*)packed.mutable_data_ptr());
  else
    TORCH_CHECK(false, "cannot pack a weight of dtype ", weight.scalar_type());
  return packed;
}

// Scale and bias of the outputs n..n+PANEL applied to accumulators.
struct Affine {
  const float *scale, *bias;
  V operator()(V v, int64_t n, int64_t count) const {
    if (scale) v = v * read(scale + n, count);
    if (bias) v = v + read(bias + n, count);
    return v;
  }
};
Affine affine(const optional<Tensor>& scale, const optional<Tensor>& bias, int64_t outputs) {
  for (const auto* t : {&scale, &bias})
    TORCH_CHECK(!t->has_value() || ((*t)->scalar_type() == at::kFloat && (*t)->numel() == outputs && (*t)->is_contiguous()),
                "scale and bias are contiguous float32 [N]");
  return {scale ? scale->const_data_ptr<float>() : nullptr, bias ? bias->const_data_ptr<float>() : nullptr};
}

// y[..., N] = x[..., K] W^T * scale + bias, in x's dtype.
Tensor linear(const Tensor& x_, const Tensor& packed, int64_t outputs, const optional<Tensor>& scale,
              const optional<Tensor>& bias) {
  const Tensor x = x_.contiguous();
  const int64_t depth = packed.size(1), rows = depth ? x.numel() / depth : 0;
  TORCH_CHECK(x.size(-1) == depth, "x has ", x.size(-1), " features, the packed weight ", depth);
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  Tensor y = at::empty(shape, x.options());
  const Affine finish = affine(scale, bias, outputs);
  with_dtype(y, [&](auto* to) {
    with_panels(packed, [&](auto w) {
      product<decltype(w)>((decltype(to))x.const_data_ptr(), rows, depth, w.w, packed.size(0),
                           [&](int, int64_t row, int64_t panel, const float* acc) {
                             for (int64_t n = panel * PANEL, i = 0; i < PANEL && n < outputs; i += LANES, n += LANES)
                               write(to + row * outputs + n, finish(load<V>(acc + i), n, outputs - n), outputs - n);
                           });
    });
  });
  return y;
}

// Index and value of the largest output of each row, without writing the outputs; ties go to the smallest index. Values are
// rounded to x's dtype first, so that the choice equals argmax(linear(x)).
std::tuple<Tensor, Tensor> linear_argmax(const Tensor& x_, const Tensor& packed, int64_t outputs,
                                         const optional<Tensor>& scale, const optional<Tensor>& bias) {
  const Tensor x = x_.contiguous();
  TORCH_CHECK(x.dim() == 2 && x.size(1) == packed.size(1), "x is [M, ", packed.size(1), "]");
  const int64_t rows = x.size(0), threads = at::get_num_threads();
  Tensor index = at::empty({rows}, x.options().dtype(at::kLong)), value = at::empty({rows}, x.options().dtype(at::kFloat));
  const Affine finish = affine(scale, bias, outputs);
  using Best = std::pair<float, int64_t>;
  std::vector<Best> best(threads * rows, Best(-std::numeric_limits<float>::infinity(), outputs));
  with_dtype(x, [&](auto* from) {
    with_panels(packed, [&](auto w) {
      product<decltype(w)>(from, rows, x.size(1), w.w, packed.size(0),
                           [&](int thread, int64_t row, int64_t panel, const float* acc) {
                             Best& b = best[thread * rows + row];
                             for (int64_t n = panel * PANEL, i = 0; i < PANEL && n < outputs; i += LANES, n += LANES) {
                               const V v = rounded(from, finish(load<V>(acc + i), n, outputs - n));
                               const int64_t count = std::min<int64_t>(LANES, outputs - n);
                               for (int64_t j = 0; j < count; ++j)
                                 if (v[j] > b.first) b = Best(v[j], n + j);
                             }
                           });
    });
  });
  for (int64_t r = 0; r < rows; ++r) {
    Best b = best[r];
    for (int64_t t = 1; t < threads; ++t)  // threads own ascending outputs, so a tie keeps the earlier thread
      if (best[t * rows + r].first > b.first) b = best[t * rows + r];
    index.mutable_data_ptr<int64_t>()[r] = b.second < outputs ? b.second : 0;
    value.mutable_data_ptr<float>()[r] = b.first;
  }
  return {index, value};
}

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
  const int threads = rows ? at::get_num_threads() : 1;
  const int64_t queries = round_up(std::max<int64_t>(QUERIES, shared), MAX_ROWS);

  with_dtype(query, [&](auto* q) {
    using T = std::remove_pointer_t<decltype(q)>;
    const T *keys = (const T*)key_cache.const_data_ptr(), *values = (const T*)value_cache.const_data_ptr();
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> widened(queries * dim), key_tile(dim * TILE), value_tile(TILE * width, 0.f);
      std::vector<float> weight(queries * TILE), acc(queries * width), peak(queries), total(queries);
#pragma omp for schedule(dynamic)
      for (size_t which = 0; which < items.size(); ++which) {
        const Item item = items[which];
        const int64_t count = (item.last - item.first) * shared;  // query heads of this item, ordered (row, head)
        const int64_t parts = (count + MAX_ROWS - 1) / MAX_ROWS;
        for (int64_t i = 0; i < count; ++i) {
          const T* from = q + ((item.first + i / shared) * heads + item.head * shared + i % shared) * dim;
          std::copy(from, from + dim, &widened[i * dim]);
        }
        std::fill_n(acc.begin(), count * width, 0.f);
        std::fill_n(peak.begin(), count, NONE);
        std::fill_n(total.begin(), count, 0.f);
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
                multiply<R>(StridedF32<TILE>{&key_tile[c]}, &widened[batch * dim], dim, w + c, TILE, 0, dim, nullptr, 0);
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
                const RowF32 v{&value_tile[d], width};
                float* a = &acc[batch * width + d];
                const auto alone = [&](int i, int64_t first, int64_t last) {
                  if (first < last) multiply<1>(v, w + i * TILE, TILE, a + i * width, width, first, last, nullptr, 0);
                };
                for (int i = 0; i < R; ++i) alone(i, from[i], std::min(to[i], all_from));
                if (all_from < all_to) multiply<R>(v, w, TILE, a, width, all_from, all_to, nullptr, 0);
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
  const int64_t rows = x.size(0), heads = x.size(1), dim = x.size(2), turned = cos.size(-1), half = turned / 2;
  TORCH_CHECK(cos.dim() == 2 && cos.sizes() == sin.sizes() && cos.size(0) == rows && turned <= dim && turned % 2 == 0,
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
            const int64_t n = half - i, a = row * turned + i, b = a + half;
            const V lo = read(from + i, n), hi = read(from + half + i, n);
            write(to + i, rounded(to, lo * read(c + a, n)) + rounded(to, -hi * read(s + a, n)), n);
            write(to + half + i, rounded(to, hi * read(c + b, n)) + rounded(to, lo * read(s + b, n)), n);
          }
          for (int64_t i = turned; i < dim; ++i) to[i] = from[i];
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

// probs[L, V] float32 = softmax(logits / temperature); temperature 0 gives the point mass on the first maximum.
Tensor softmax_rows(const Tensor& logits_, const Tensor& temperature_) {
  const Tensor logits = logits_.contiguous(), temperature = temperature_.to(at::kFloat).contiguous();
  const int64_t rows = logits.size(0), size = logits.size(1), blocks = (size + BLOCK - 1) / BLOCK;
  TORCH_CHECK(temperature.numel() == rows, "temperature is [", rows, "]");
  Tensor probs = at::empty({rows, size}, logits.options().dtype(at::kFloat));
  float* to = probs.mutable_data_ptr<float>();
  const float* heat = temperature.const_data_ptr<float>();
  std::vector<float> peak(rows * blocks), scale(rows);
  std::vector<double> mass(rows * blocks);
  with_dtype(logits, [&](auto* from) {
    const auto each_block = [&](auto f) {
      split(rows * blocks, rows * size, [&](int64_t first, int64_t last) {
        for (int64_t b = first; b < last; ++b) f(b, b / blocks, b % blocks * BLOCK, std::min(size, (b % blocks + 1) * BLOCK));
      });
    };
    each_block([&](int64_t b, int64_t row, int64_t begin, int64_t end) {
      V best = splat(NONE);
      int64_t i = begin;
      for (; i + LANES <= end; i += LANES) best = maximum(best, read(from + row * size + i));
      peak[b] = top(best);
      for (; i < end; ++i) peak[b] = std::max(peak[b], (float)from[row * size + i]);
    });
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t b = 1; b < blocks; ++b) peak[row * blocks] = std::max(peak[row * blocks], peak[row * blocks + b]);
    each_block([&](int64_t b, int64_t row, int64_t begin, int64_t end) {
      const float highest = peak[row * blocks];
      const V inverse = splat(1.f / heat[row]);
      V lanes{};
      for (int64_t i = begin; i < end; i += LANES) {
        const V x = read(from + row * size + i, end - i);
        V p = heat[row] > 0 ? exponential((x - splat(highest)) * inverse) : (x == splat(highest) ? splat(1.f) : V{});
        if (end - i < LANES) p = lane_index() < (int)(end - i) ? p : V{};
        lanes += p;
        write(to + row * size + i, p, end - i);
      }
      mass[b] = sum(lanes);
    });
    for (int64_t row = 0; row < rows; ++row) {
      double all = 0;
      for (int64_t b = 0; b < blocks; ++b) all += mass[row * blocks + b];
      scale[row] = (float)(1 / all);
      if (heat[row] > 0 || all == 1) continue;
      for (int64_t i = 0, seen = 0; i < size; ++i) {  // several maxima: the first one keeps everything
        float& p = to[row * size + i];
        if (p > 0 && seen++) p = 0;
      }
      scale[row] = 1;
    }
    each_block([&](int64_t, int64_t row, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[row * size + i] *= scale[row];
    });
  });
  return probs;
}

// First index of the largest logit of every row: [L, V] -> [L] int64.
Tensor argmax_rows(const Tensor& logits_) {
  const Tensor logits = logits_.contiguous();
  const int64_t rows = logits.size(0), size = logits.size(1), blocks = (size + BLOCK - 1) / BLOCK;
  Tensor index = at::empty({rows}, logits.options().dtype(at::kLong));
  int64_t* to = index.mutable_data_ptr<int64_t>();
  std::vector<float> peak(rows * blocks);
  with_dtype(logits, [&](auto* from) {
    split(rows * blocks, rows * size, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) {
        const auto* row = from + b / blocks * size;
        const int64_t begin = b % blocks * BLOCK, end = std::min(size, begin + BLOCK);
        V best = splat(NONE);
        int64_t i = begin;
        for (; i + LANES <= end; i += LANES) best = maximum(best, read(row + i));
        peak[b] = top(best);
        for (; i < end; ++i) peak[b] = std::max(peak[b], (float)row[i]);
      }
    });
    for (int64_t r = 0; r < rows; ++r) {
      const float* peaks = peak.data() + r * blocks;
      const int64_t block = std::max_element(peaks, peaks + blocks) - peaks;  // the first of equals
      to[r] = 0;
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

TORCH_LIBRARY(surefoot, m) {
  m.def("pack(Tensor weight) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, int outputs, Tensor? scale, Tensor? bias) -> Tensor");
  m.def("linear_argmax(Tensor x, Tensor packed, int outputs, Tensor? scale, Tensor? bias) -> (Tensor, Tensor)");
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
  m.impl("pack", &pack);
  m.impl("linear", &linear);
  m.impl("linear_argmax", &linear_argmax);
  m.impl("paged_attention", &paged_attention);
  m.impl("rms_norm", &rms_norm);
  m.impl("rotary", &rotary);
  m.impl("gated_activation", &gated_activation);
  m.impl("softmax_rows", &softmax_rows);
  m.impl("argmax_rows", &argmax_rows);
  m.impl("sample_rows", &sample_rows);
}
