// What every kernel of surefoot is written with: vectors of floats, rows of either dtype, and the block product.
//
// One rule holds everywhere: a row's result is computed in an order that depends on that row alone (its length, its
// position), never on how many rows there are, where the row stands, or how many threads run. Greedy decoding with and
// without speculation then agrees bit for bit without luck. Fused multiply-adds are written out (`fma`) and the file is
// compiled with -ffp-contract=off, so that no template instance may round differently from another.

#pragma once

#include "threads.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
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

namespace {  // a process may hold these kernels for several instruction sets: nothing may be shared between the libraries

using at::BFloat16;
using at::Tensor;
using c10::optional;

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

// ------------------------------------------------------------------------------------------------ the block product

// Weights come one input at a time as two vectors, outputs 0..LANES-1 and LANES..PANEL-1 of a panel. A class of weights says
// what an input is (`Input`), what the vectors hold (`Vector`), and how one is multiplied into the sums (`add`).
struct FloatWeights {
  using Input = float;
  using Vector = V;
  static V spread(float x) { return splat(x); }
  static V add(V x, V w, V sum) { return fma(x, w, sum); }
};
template <int STRIDE>
struct StridedF32 : FloatWeights {
  const float* w;
  StridedF32(const float* w) : w(w) {}
  void get(int64_t k, V& lo, V& hi) const {
    lo = load<V>(w + k * STRIDE);
    hi = load<V>(w + k * STRIDE + LANES);
  }
};
struct RowF32 : FloatWeights {  // rows of a stride known only at run time
  const float* w;
  int64_t stride;
  RowF32(const float* w, int64_t stride) : w(w), stride(stride) {}
  void get(int64_t k, V& lo, V& hi) const {
    lo = load<V>(w + k * stride);
    hi = load<V>(w + k * stride + LANES);
  }
};

// acc[r][0..PANEL) += sum over k in [first, last) of x[r][k] * w[k][0..PANEL), k strictly ascending for every output.
template <int R, class W>
inline __attribute__((always_inline)) void multiply(W w, const typename W::Input* x, int64_t x_stride, float* acc,
                                                    int64_t acc_stride, int64_t first, int64_t last) {
  V a[R][2];
  UNROLL for (int r = 0; r < R; ++r) {
    a[r][0] = load<V>(acc + r * acc_stride);
    a[r][1] = load<V>(acc + r * acc_stride + LANES);
  }
  for (int64_t k = first; k < last; ++k) {
    typename W::Vector lo, hi;
    w.get(k, lo, hi);
    UNROLL for (int r = 0; r < R; ++r) {
      const auto b = W::spread(x[r * x_stride + k]);
      a[r][0] = W::add(b, lo, a[r][0]);
      a[r][1] = W::add(b, hi, a[r][1]);
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

}  // namespace
