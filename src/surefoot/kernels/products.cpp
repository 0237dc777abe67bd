// Thin matrix products y = x W^T over weights packed once: the reading of the weights is what they cost.
//
// A packed weight is laid out for one way of computing and carries that in its shape:
//   panels  [panels, K, PANEL]           bfloat16, float32 or int8; widened to float vectors, fused multiply-adds
//   pairs   [panels, K / 2, PANEL, 2]    bfloat16; AVX-512's dot products over pairs of inputs
//   tiles   [panels, K / 32, 2, 16, 32]  bfloat16 or int8; AMX: a panel of 32 outputs is two tiles of 16 pairs x 16 outputs
// (bfloat16 is held as int16; missing inputs and outputs are zeros.)
//
// Every output is summed in an order fixed by the number of inputs alone. See the rule in vectors.hpp.

#include "tiles.hpp"

#include <ATen/ops/from_blob.h>

#include <functional>
#include <memory>
#include <mutex>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#ifndef SUREFOOT_NAMESPACE
#define SUREFOOT_NAMESPACE surefoot
#endif

namespace {

// ------------------------------------------------------------------------------------------------ panels

// Weights of panel p of [panels, depth, PANEL] are made by W(w, depth, p).
struct Bf16Panel : FloatWeights {  // each 32-bit word holds output j in its low half and j + LANES in its high half
  using Element = uint16_t;
  static constexpr int64_t BYTES = PANEL * 2;  // of one input
  const uint16_t* w;
  Bf16Panel(const uint16_t* w, int64_t depth, int64_t panel) : w(w + panel * depth * PANEL) {}
  void get(int64_t k, V& lo, V& hi) const {
    U u = load<U>(w + k * PANEL);
    lo = (V)(u << 16);
    hi = (V)(u & 0xffff0000u);
  }
};
struct F32Panel : StridedF32<PANEL> {
  using Element = float;
  static constexpr int64_t BYTES = PANEL * 4;  // of one input
  F32Panel(const float* w, int64_t depth, int64_t panel) : StridedF32(w + panel * depth * PANEL) {}
};
inline V widen(const int8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  return __builtin_convertvector(__builtin_convertvector(load<B>(p), I), V);
#endif
}
struct Int8Panel : FloatWeights {
  using Element = int8_t;
  static constexpr int64_t BYTES = PANEL;  // of one input
  const int8_t* w;
  Int8Panel(const int8_t* w, int64_t depth, int64_t panel) : w(w + panel * depth * PANEL) {}
  void get(int64_t k, V& lo, V& hi) const {
    lo = widen(w + k * PANEL);
    hi = widen(w + k * PANEL + LANES);
  }
};

#if SUREFOOT_TILES
// Pairs of inputs; what `multiply` calls an input is a pair here, and depth counts pairs.
struct PairPanel {
  using Element = uint16_t;
  static constexpr int64_t BYTES = PANEL * 4;  // of one input
  using Input = uint32_t;
  using Vector = U;
  const uint16_t* w;
  PairPanel(const uint16_t* w, int64_t depth, int64_t panel) : w(w + panel * depth * 2 * PANEL) {}
  static U spread(uint32_t x) { return U{} + x; }
  static V add(U x, U w, V sum) { return add_dots(sum, x, w); }
  void get(int64_t k, U& lo, U& hi) const {
    lo = load<U>(w + k * 2 * PANEL);
    hi = load<U>(w + k * 2 * PANEL + 2 * LANES);
  }
};

// The same bytes, and those of the tiles, one input at a time for float32 rows: slower, and seldom needed.
inline V pick(const uint16_t* pairs, int64_t odd) {
  const U u = load<U>(pairs);
  return (V)(odd ? u & 0xffff0000u : u << 16);
}
inline V pick(const int8_t* pairs, int64_t odd) {
  V v;
  UNROLL for (int i = 0; i < LANES; ++i) v[i] = pairs[2 * i + odd];
  return v;
}
struct WidenedPairs : FloatWeights {
  using Element = uint16_t;
  static constexpr int64_t BYTES = PANEL * 2;  // of one input
  const uint16_t* w;
  WidenedPairs(const uint16_t* w, int64_t depth, int64_t panel) : w(w + panel * ((depth + 1) / 2) * 2 * PANEL) {}
  void get(int64_t k, V& lo, V& hi) const {
    const uint16_t* pairs = w + k / 2 * 2 * PANEL;
    lo = pick(pairs, k % 2);
    hi = pick(pairs + 2 * LANES, k % 2);
  }
};
template <class E>
struct WidenedTiles : FloatWeights {
  using Element = E;
  static constexpr int64_t BYTES = PANEL * sizeof(E);  // of one input
  const E *low, *high;
  WidenedTiles(const E* w, int64_t depth, int64_t panel)
      : low(at(w, depth, panel * PANEL)), high(at(w, depth, panel * PANEL + LANES)) {}
  static const E* at(const E* w, int64_t depth, int64_t n) {
    return w + n / 32 * ((depth + 31) / 32) * 1024 + n % 32 / 16 * 512 + n % 16 * 2;
  }
  void get(int64_t k, V& lo, V& hi) const {
    const int64_t place = k / 32 * 1024 + k % 32 / 2 * 32;
    lo = pick(low + place, k % 2);
    hi = pick(high + place, k % 2);
  }
};
#endif

constexpr int64_t K_CHUNK = 128;   // inputs of a panel handled for all rows before moving on: stays in the L1 cache
constexpr int64_t ROW_BLOCK = 48;  // rows per reading of the weights: far more arithmetic than the reading hides
constexpr int FEW_ROWS = 2;  // up to so many leave room in the registers for a second panel, and need its chains

// x [rows, inputs] of either dtype, and where finished sums go: emit(thread, row, first output, sums, how many). Neither is a
// template parameter of the products, which would be compiled four times otherwise.
struct Rows {
  const void* data;
  bool half;
  int64_t count, inputs;
  const BFloat16* halves(int64_t row) const { return (const BFloat16*)data + row * inputs; }
  void copy(int64_t row, float* to) const {  // up to a whole vector
    const auto widened = [&](auto* from) {
      for (int64_t k = 0; k < inputs; k += LANES) store(to + k, read(from + k, inputs - k));
    };
    half ? widened(halves(row)) : widened((const float*)data + row * inputs);
  }
  void copy(int64_t row, uint32_t* to) const {  // pairs
    to[inputs / 2] = 0;
    std::memcpy(to, halves(row), inputs * sizeof(BFloat16));
  }
};
using Emit = std::function<void(int, int64_t, int64_t, const float*, int)>;

// acc[p][r][0..PANEL) += sum over k in [first, last) of x[k][r] * panel[p][k][0..PANEL), k strictly ascending for every output.
// FETCH: on the way, as many bytes are fetched into the cache from ahead[p] on, every line once. (Fetching a line again costs as
// much as a load, and turns by single inputs are limited by what is not arithmetic.)
template <int R, int P, bool FETCH, class W>
inline void multiply_panels(const W* panel, const typename W::Input* x, float* acc, int64_t acc_stride, int64_t first,
                            int64_t last, const char* const* ahead) {
  constexpr int64_t STEP = 4, LINE = 64;
  V a[P][R][2];
  UNROLL for (int p = 0; p < P; ++p)
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int h = 0; h < 2; ++h) a[p][r][h] = load<V>(acc + p * acc_stride + r * PANEL + h * LANES);
  const typename W::Input* spread = x + first * R;
  const auto add_input = [&](int64_t k) __attribute__((always_inline)) {
    UNROLL for (int p = 0; p < P; ++p) {
      typename W::Vector lo, hi;
      panel[p].get(k, lo, hi);
      UNROLL for (int r = 0; r < R; ++r) {
        const auto b = W::spread(spread[r]);
        a[p][r][0] = W::add(b, lo, a[p][r][0]);
        a[p][r][1] = W::add(b, hi, a[p][r][1]);
      }
    }
    spread += R;
  };
  int64_t k = first;
  for (int64_t fetched = 0; k + STEP <= last; k += STEP, fetched += STEP * W::BYTES) {
    if constexpr (FETCH)
      UNROLL for (int p = 0; p < P; ++p)
        UNROLL for (int64_t i = 0; i < STEP * W::BYTES; i += LINE) __builtin_prefetch(ahead[p] + fetched + i);
    UNROLL for (int64_t i = 0; i < STEP; ++i) add_input(k + i);
  }
  for (; k < last; ++k) add_input(k);
  UNROLL for (int p = 0; p < P; ++p)
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int h = 0; h < 2; ++h) store(acc + p * acc_stride + r * PANEL + h * LANES, a[p][r][h]);
}

// Computes x W^T panel by panel, two at a time.
template <class W>
void product(const Rows& x, const typename W::Element* w, int64_t panels, const Emit& emit) {
  const int64_t rows = x.count, inputs = x.inputs;
  using Input = typename W::Input;
  constexpr int64_t per = std::is_same_v<Input, float> ? 1 : 2;  // elements of x in one input of W
  const int64_t depth = (inputs + per - 1) / per, padded = (depth + LANES - 1) / LANES * LANES;
  std::vector<Input> filled(std::min(rows, ROW_BLOCK) * padded);  // group by group, [k][rows of the group]
  for (int64_t block = 0; block < rows; block += ROW_BLOCK) {
    const int64_t here = std::min(ROW_BLOCK, rows - block), groups = (here + MAX_ROWS - 1) / MAX_ROWS;
    const auto start = [&](int64_t group) { return here * group / groups; };  // evenly sized
    split(groups, here * inputs / 8, [&](int64_t first_group, int64_t last_group) {
      std::vector<Input> row(padded + LANES);  // `copy` may write one more
      for (int64_t g = first_group; g < last_group; ++g)
        for (int64_t r = start(g), size = start(g + 1) - r, i = 0; i < size; ++i) {
          x.copy(block + r + i, row.data());
          Input* const to = &filled[r * padded + i];
          for (int64_t k = 0; k < depth; ++k) to[k * size] = row[k];
        }
    });
    const int64_t together = here <= FEW_ROWS ? 2 : 1;
    share(panels, here * inputs * panels, [&](int64_t first_panel, int64_t last_panel) {
      float acc[ROW_BLOCK * PANEL];
      for (int64_t panel = first_panel; panel < last_panel; panel += together) {
        const int64_t count = std::min(together, last_panel - panel), stride = here * PANEL;
        const W weights[2] = {W(w, depth, panel), W(w, depth, panel + count - 1)};
        std::memset(acc, 0, count * stride * sizeof(float));
        for (int64_t k = 0; k < depth; k += K_CHUNK) {
          const int64_t end = std::min(depth, k + K_CHUNK);
          const char* ahead = (const char*)w + (panel * depth + k + K_CHUNK) * W::BYTES;
          const char* both[2] = {ahead, ahead + depth * W::BYTES};
          for (int64_t g = 0; g < groups; ++g) {  // the first fetches the next chunk
            const int64_t first = start(g), size = start(g + 1) - first;
            const Input* from = &filled[first * padded];
            float* const to = acc + first * PANEL;
            if (count == 2)
              size == 1 ? multiply_panels<1, 2, true>(weights, from, to, stride, k, end, both)
                        : multiply_panels<2, 2, true>(weights, from, to, stride, k, end, both);
            else
              with_rows((int)size, [&](auto r) {
                g == 0 ? multiply_panels<decltype(r)::value, 1, true>(weights, from, to, stride, k, end, both)
                       : multiply_panels<decltype(r)::value, 1, false>(weights, from, to, stride, k, end, both);
              });
          }
        }
        for (int64_t p = 0; p < count; ++p)
          for (int64_t r = 0; r < here; ++r)
            emit(omp_get_thread_num(), block + r, (panel + p) * PANEL, acc + p * stride + r * PANEL, PANEL);
      }
    });
  }
}

// ------------------------------------------------------------------------------------------------ tiles

constexpr int64_t TILE = 512;        // bfloat16 in a tile: 16 rows of 32
constexpr int64_t TILED_ROWS = 128;  // rows per reading of the weights; their tiles fit the L2 cache beside a panel
#ifndef SUREFOOT_AHEAD  // to be tried out with `native.load_products`
#define SUREFOOT_AHEAD 8192
#define SUREFOOT_LOCALITY 3
#endif
constexpr int64_t AHEAD = SUREFOOT_AHEAD;  // bytes between what is multiplied and what is fetched

#if SUREFOOT_TILES
// acc[16 ROWS][16 COLUMNS of 32] += x w over `count` tiles of inputs. x: ROWS tiles of 16 rows, `x_stride` apart; w: the first
// of COLUMNS tiles of 16 outputs in every pair of tiles.
template <int ROWS, int COLUMNS>
inline void multiply_block(const uint16_t* x, int64_t x_stride, const uint16_t* w, int64_t count, float* acc, bool fetch) {
  constexpr int64_t LINE = 32 * sizeof(float), LOWER = 16 * 32;
  load_tile<0>(acc, LINE);
  if constexpr (COLUMNS == 2) load_tile<1>(acc + 16, LINE);
  if constexpr (ROWS == 2) load_tile<2>(acc + LOWER, LINE);
  if constexpr (ROWS == 2 && COLUMNS == 2) load_tile<3>(acc + LOWER + 16, LINE);
  for (int64_t t = 0; t < count; ++t, x += TILE, w += 2 * TILE) {
    const uint16_t* const ahead = w + AHEAD / sizeof *w;
    if (fetch)
      UNROLL for (int64_t i = 0; i < COLUMNS * TILE; i += 32) __builtin_prefetch(ahead + i, 0, SUREFOOT_LOCALITY);
    load_tile<4>(x, 64);
    load_tile<6>(w, 64);
    multiply_tiles<0, 4, 6>();
    if constexpr (COLUMNS == 2) {
      load_tile<7>(w + TILE, 64);
      multiply_tiles<1, 4, 7>();
    }
    if constexpr (ROWS == 2) {
      load_tile<5>(x + x_stride, 64);
      multiply_tiles<2, 5, 6>();
      if constexpr (COLUMNS == 2) multiply_tiles<3, 5, 7>();
    }
  }
  store_tile<0>(acc, LINE);
  if constexpr (COLUMNS == 2) store_tile<1>(acc + 16, LINE);
  if constexpr (ROWS == 2) store_tile<2>(acc + LOWER, LINE);
  if constexpr (ROWS == 2 && COLUMNS == 2) store_tile<3>(acc + LOWER + 16, LINE);
}

// int8 tiles as bfloat16, exactly; what is read next is fetched on the way.
inline const uint16_t* as_bfloat16(const int8_t* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; i += 2 * LANES) {
    if (i % 64 == 0) __builtin_prefetch(from + AHEAD + i);
    narrow_pair(to + i, widen(from + i), widen(from + i + LANES));
  }
  return to;
}
inline const uint16_t* as_bfloat16(const uint16_t* from, int64_t, uint16_t*) { return from; }

template <class E>
void tiled_product(const Rows& x, const E* w, int64_t panels, const Emit& emit) {
  const int64_t rows = x.count, inputs = x.inputs;
  constexpr bool unpacks = sizeof(E) == 1;
  const int64_t depth = (inputs + 31) / 32, chunk = unpacks ? 8 : depth, row_tiles = (std::min(rows, TILED_ROWS) + 15) / 16;
  Tensor tiled = at::empty({row_tiles, depth, TILE}, at::kShort);
  uint16_t* const x_tiles = (uint16_t*)tiled.mutable_data_ptr();
  for (int64_t block = 0; block < rows; block += TILED_ROWS) {
    const int64_t here = std::min(TILED_ROWS, rows - block), groups = (here + 15) / 16;
    split(groups * 16, here * inputs / 8, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        uint16_t* to = x_tiles + r / 16 * depth * TILE + r % 16 * 32;
        const BFloat16* from = x.halves(block + r);
        const int64_t whole = r < here ? inputs / 32 : 0, rest = r < here ? inputs % 32 : 0;
        for (int64_t t = 0; t < depth; ++t, to += TILE) {
          if (t < whole) {
            std::memcpy(to, from + t * 32, 64);
          } else {
            std::memset(to, 0, 64);
            if (t == whole && rest) std::memcpy(to, from + t * 32, rest * sizeof *to);
          }
        }
      }
    });
    split(2 * panels, here * inputs * panels, [&](int64_t first, int64_t last) {  // half panels: evener for many threads
      alignas(64) float acc[TILED_ROWS * 32];
      alignas(64) uint16_t unpacked[unpacks ? 8 * 2 * TILE : 1];
      configure_tiles(TileConfig());
      for (int64_t half = first, columns; half < last; half += columns) {
        columns = half % 2 == 0 && half + 1 < last ? 2 : 1;
        std::memset(acc, 0, groups * 16 * 32 * sizeof(float));
        for (int64_t t = 0; t < depth; t += chunk) {
          const int64_t count = std::min(chunk, depth - t);
          const E* both = w + (half / 2 * depth + t) * 2 * TILE;
          const uint16_t* weights = as_bfloat16(both, count * 2 * TILE, unpacked) + half % 2 * TILE;
          for (int64_t g = 0; g < groups; g += 2) {
            const uint16_t* from = x_tiles + (g * depth + t) * TILE;
            float* to = acc + g * 16 * 32;
            const bool fetch = !unpacks && g == 0;
            if (g + 1 < groups)
              columns == 2 ? multiply_block<2, 2>(from, depth * TILE, weights, count, to, fetch)
                           : multiply_block<2, 1>(from, depth * TILE, weights, count, to, fetch);
            else
              columns == 2 ? multiply_block<1, 2>(from, depth * TILE, weights, count, to, fetch)
                           : multiply_block<1, 1>(from, depth * TILE, weights, count, to, fetch);
          }
        }
        for (int64_t r = 0; r < here; ++r)
          emit(omp_get_thread_num(), block + r, half * 16, acc + r * 32, (int)columns * 16);
      }
      release_tiles();
    });
  }
}
#endif

// ------------------------------------------------------------------------------------------------ packing

// Packs the rows of all weights, one after the other, panel by panel and 32 inputs at a time through a block that stays in the
// cache. `place(output, input)` says where in the block of 32 inputs an element goes; `pad` is what the number of inputs is
// rounded up to.
template <int64_t OUTPUTS, class E, class Place>
void interleave(const std::vector<Tensor>& weights, E* to, int64_t panels, int64_t inputs, int64_t pad, Place place) {
  const int64_t padded = (inputs + pad - 1) / pad * pad;
  split(panels, panels * OUTPUTS * inputs, [&](int64_t first, int64_t last) {  // first touch by the thread that will read
    size_t which = 0;
    int64_t before = 0;  // outputs of the weights in front of `which`
    for (int64_t panel = first; panel < last; ++panel) {
      const E* from[OUTPUTS];
      for (int64_t j = 0; j < OUTPUTS; ++j) {
        const int64_t n = panel * OUTPUTS + j;
        while (which < weights.size() && n - before >= weights[which].size(0)) before += weights[which++].size(0);
        from[j] = which < weights.size() ? (const E*)weights[which].const_data_ptr() + (n - before) * inputs : nullptr;
      }
      alignas(64) E block[OUTPUTS * 32];
      for (int64_t k = 0; k < padded; k += 32) {
        const int64_t count = std::min<int64_t>(32, inputs - k);
        if (count < 32 || !from[OUTPUTS - 1]) std::memset(block, 0, sizeof block);
        for (int64_t j = 0; j < OUTPUTS; ++j) {
          if (!from[j]) continue;
          if (count == 32)
            UNROLL for (int64_t i = 0; i < 32; ++i) block[place(j, i)] = from[j][k + i];
          else
            for (int64_t i = 0; i < count; ++i) block[place(j, i)] = from[j][k + i];
        }
        std::memcpy(to + (panel * padded + k) * OUTPUTS, block, std::min<int64_t>(32, padded - k) * OUTPUTS * sizeof(E));
      }
    }
  });
}

#ifdef __linux__
// Memory of packed weights: one tensor behind the other in mappings that begin on a huge page. A layer's weights are a few
// megabytes, and where each lies on its own, or in memory that was used before, much of it ends up on small pages, whose
// addresses are looked up all the time.
struct Mapping {
  static constexpr size_t HUGE_PAGE = 2 << 20, SIZE = 256 << 20;
  char *all, *begin;
  size_t reserved, size, used = 0;
  explicit Mapping(size_t bytes) : reserved(std::max(bytes, SIZE) + HUGE_PAGE), size(reserved - HUGE_PAGE) {
    all = (char*)mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(all != MAP_FAILED, "no memory for ", bytes, " bytes of weights");
    begin = (char*)(((uintptr_t)all + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    madvise(begin, size, MADV_HUGEPAGE);  // a wish
  }
  ~Mapping() { munmap(all, reserved); }
};

Tensor lasting(const std::vector<int64_t>& shape, const at::TensorOptions& options) {
  static std::mutex alone;
  static std::weak_ptr<Mapping> latest;  // lives as long as its tensors
  size_t bytes = options.dtype().itemsize();
  for (const int64_t extent : shape) bytes *= extent;
  const size_t page = sysconf(_SC_PAGESIZE);  // what is given back are whole pages: nobody may share one
  bytes = (bytes + page - 1) / page * page;
  const std::lock_guard<std::mutex> guard(alone);
  std::shared_ptr<Mapping> mapping = latest.lock();
  if (!mapping || mapping->size - mapping->used < bytes) latest = mapping = std::make_shared<Mapping>(bytes);
  char* const here = mapping->begin + mapping->used;
  mapping->used += bytes;
  const auto give_back = [mapping, bytes](void* data) { madvise(data, bytes, MADV_DONTNEED); };
  return at::from_blob(here, shape, give_back, options);
}
#else
Tensor lasting(const std::vector<int64_t>& shape, const at::TensorOptions& options) { return at::empty(shape, options); }
#endif

// Weights [N_i, K] of one dtype (bfloat16, float32, int8), one after the other along N, in the layout "panels", "pairs" or
// "tiles". Float weights are always laid out in panels, int8 weights never in pairs.
Tensor pack(std::vector<Tensor> weights, const std::string& layout) {
  TORCH_CHECK(!weights.empty(), "nothing to pack");
  const int64_t inputs = weights[0].size(1);
  const auto type = weights[0].scalar_type();
  int64_t outputs = 0;
  for (Tensor& weight : weights) {
    TORCH_CHECK(weight.dim() == 2 && weight.size(1) == inputs && weight.scalar_type() == type,
                "weights are [N, ", inputs, "] of one dtype, got ", weight.sizes(), " ", weight.scalar_type());
    weight = weight.contiguous();
    outputs += weight.size(0);
  }
  const bool half = type == at::kBFloat16;
  const bool tiles = layout == "tiles" && type != at::kFloat, pairs = layout == "pairs" && half;
  TORCH_CHECK(layout == "panels" || layout == "pairs" || layout == "tiles", "no layout is called ", layout);
  const int64_t width = tiles ? 32 : PANEL, panels = (outputs + width - 1) / width;
  std::vector<int64_t> shape{panels, inputs, PANEL};
  if (pairs) shape = {panels, (inputs + 1) / 2, PANEL, 2};
  if (tiles) shape = {panels, (inputs + 31) / 32, 2, 16, 32};
  Tensor packed = lasting(shape, weights[0].options().dtype(half ? at::kShort : type));
  const auto in_order = [](int64_t j, int64_t k) { return k * PANEL + j; };
  const auto in_words = [](int64_t j, int64_t k) { return k * PANEL + j % LANES * 2 + j / LANES; };
  const auto in_pairs = [](int64_t j, int64_t k) { return k / 2 * 2 * PANEL + j * 2 + k % 2; };
  const auto in_tiles = [](int64_t j, int64_t k) { return j / 16 * TILE + k / 2 * 32 + j % 16 * 2 + k % 2; };
  void* const to = packed.mutable_data_ptr();
  if (half && tiles)
    interleave<32>(weights, (int16_t*)to, panels, inputs, 32, in_tiles);
  else if (half && pairs)
    interleave<PANEL>(weights, (int16_t*)to, panels, inputs, 2, in_pairs);
  else if (half)
    interleave<PANEL>(weights, (int16_t*)to, panels, inputs, 1, in_words);
  else if (type == at::kFloat)
    interleave<PANEL>(weights, (float*)to, panels, inputs, 1, in_order);
  else if (type == at::kChar && tiles)
    interleave<32>(weights, (int8_t*)to, panels, inputs, 32, in_tiles);
  else if (type == at::kChar)
    interleave<PANEL>(weights, (int8_t*)to, panels, inputs, 1, in_order);
  else
    TORCH_CHECK(false, "cannot pack a weight of dtype ", type);
  return packed;
}

// ------------------------------------------------------------------------------------------------ operations

// Runs the product that the layout and the dtypes call for.
void run(const Rows& x, const Tensor& packed, int64_t outputs, const Emit& emit) {
  const auto type = packed.scalar_type();
  const int64_t dims = packed.dim(), panels = (outputs + PANEL - 1) / PANEL;
  const auto has = [&](int64_t count, int64_t depth) { return packed.size(0) == count && packed.size(1) == depth; };
  const auto *halves = (const uint16_t*)packed.const_data_ptr();
  const auto *bytes = (const int8_t*)packed.const_data_ptr();
  if (dims == 3 && packed.size(2) == PANEL && has(panels, x.inputs)) {
    if (type == at::kShort) return product<Bf16Panel>(x, halves, panels, emit);
    if (type == at::kFloat) return product<F32Panel>(x, (const float*)halves, panels, emit);
    if (type == at::kChar) return product<Int8Panel>(x, bytes, panels, emit);
  }
#if SUREFOOT_TILES
  if (dims == 4 && packed.size(2) == PANEL && has(panels, (x.inputs + 1) / 2)) {
    static const std::string missing = dots_missing();
    TORCH_CHECK(missing.empty(), "weight was packed for AVX-512 BF16: ", missing);
    return x.half ? product<PairPanel>(x, halves, panels, emit) : product<WidenedPairs>(x, halves, panels, emit);
  }
  if (dims == 5 && has((outputs + 31) / 32, (x.inputs + 31) / 32)) {
    TORCH_CHECK(tiles_missing().empty(), "weight was packed for AMX: ", tiles_missing());
    if (x.half)
      return type == at::kChar ? tiled_product(x, bytes, packed.size(0), emit) : tiled_product(x, halves, packed.size(0), emit);
    return type == at::kChar ? product<WidenedTiles<int8_t>>(x, bytes, panels, emit)
                             : product<WidenedTiles<uint16_t>>(x, halves, panels, emit);
  }
#endif
  TORCH_CHECK(false, "no product of these kernels reads a weight ", packed.sizes(), " of dtype ", type, " for x with ",
              x.inputs, " features and ", outputs, " outputs");
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

Rows rows_of(const Tensor& x) {
  const int64_t inputs = x.size(-1);
  return {x.const_data_ptr(), x.scalar_type() == at::kBFloat16, inputs ? x.numel() / inputs : 0, inputs};
}

// y[..., N] = x[..., K] W^T * scale + bias, in x's dtype.
Tensor linear(const Tensor& x_, const Tensor& packed, int64_t outputs, const optional<Tensor>& scale,
              const optional<Tensor>& bias) {
  const Tensor x = x_.contiguous();
  const Rows rows = rows_of(x);
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  Tensor y = at::empty(shape, x.options());
  const Affine finish = affine(scale, bias, outputs);
  with_dtype(y, [&](auto* to) {
    run(rows, packed, outputs, [&](int, int64_t row, int64_t n, const float* acc, int width) {
      for (int i = 0; i < width && n < outputs; i += LANES, n += LANES)
        write(to + row * outputs + n, finish(load<V>(acc + i), n, outputs - n), outputs - n);
    });
  });
  return y;
}

// Index and value of the largest output of each row, without writing the outputs; ties go to the smallest index. Values are
// rounded to x's dtype first, so that the choice equals argmax(linear(x)).
std::tuple<Tensor, Tensor> linear_argmax(const Tensor& x_, const Tensor& packed, int64_t outputs,
                                         const optional<Tensor>& scale, const optional<Tensor>& bias) {
  const Tensor x = x_.contiguous();
  TORCH_CHECK(x.dim() == 2, "x is [M, K], got ", x.sizes());
  const Rows given = rows_of(x);
  const int64_t rows = given.count, threads = at::get_num_threads();
  Tensor index = at::empty({rows}, x.options().dtype(at::kLong)), value = at::empty({rows}, x.options().dtype(at::kFloat));
  const Affine finish = affine(scale, bias, outputs);
  using Best = std::pair<float, int64_t>;
  const auto better = [](const Best& a, const Best& b) { return a.first > b.first || (a.first == b.first && a.second < b.second); };
  std::vector<Best> best(threads * rows, Best(-std::numeric_limits<float>::infinity(), outputs));
  with_dtype(x, [&](auto* from) {
    run(given, packed, outputs, [&](int thread, int64_t row, int64_t n, const float* acc, int width) {
      Best& b = best[thread * rows + row];
      for (int i = 0; i < width && n < outputs; i += LANES, n += LANES) {
        const V v = rounded(from, finish(load<V>(acc + i), n, outputs - n));
        const int64_t count = std::min<int64_t>(LANES, outputs - n);
        for (int64_t j = 0; j < count; ++j)
          if (v[j] >= b.first && better(Best(v[j], n + j), b)) b = Best(v[j], n + j);
      }
    });
  });
  for (int64_t r = 0; r < rows; ++r) {
    Best b = best[r];
    for (int64_t t = 1; t < threads; ++t)
      if (better(best[t * rows + r], b)) b = best[t * rows + r];
    index.mutable_data_ptr<int64_t>()[r] = b.second < outputs ? b.second : 0;
    value.mutable_data_ptr<float>()[r] = b.first;
  }
  return {index, value};
}

// Reads every byte once (of whole kilobytes), as the products do: the speed that theirs is judged by. Returns the disjunction
// of what it read, 0 only if everything was.
int64_t stream(const Tensor& data) {
  TORCH_CHECK(data.is_contiguous(), "data is contiguous");
  constexpr int64_t BLOCK = 16 * sizeof(U);  // at most 1024
  const char* from = (const char*)data.const_data_ptr();
  std::atomic<int64_t> all = 0;
  split((int64_t)data.nbytes() / BLOCK, data.nbytes(), [&](int64_t first, int64_t last) {
    U seen[16] = {};
    for (int64_t b = first; b < last; ++b)
      UNROLL for (int i = 0; i < 16; ++i) {
        const char* at = from + b * BLOCK + i * sizeof(U);
        if (i * sizeof(U) % 64 == 0) __builtin_prefetch(at + AHEAD);
        seen[i] |= load<U>(at);
      }
    int64_t mine = 0;
    for (const U& u : seen)
      for (int i = 0; i < LANES; ++i) mine |= u[i];
    all |= mine;
  });
  return all;
}

// Why the layout cannot be computed with on this CPU; empty if it can.
std::string layout_missing(const std::string& layout) {
  return layout == "tiles" ? tiles_missing() : layout == "pairs" ? dots_missing() : "";
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(SUREFOOT_NAMESPACE, m) {
  m.def("pack(Tensor[] weights, str layout) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, int outputs, Tensor? scale, Tensor? bias) -> Tensor");
  m.def("linear_argmax(Tensor x, Tensor packed, int outputs, Tensor? scale, Tensor? bias) -> (Tensor, Tensor)");
  m.def("stream(Tensor data) -> int");
  m.def("layout_missing(str layout) -> str", &layout_missing);
}

TORCH_LIBRARY_IMPL(SUREFOOT_NAMESPACE, CPU, m) {
  m.impl("pack", &pack);
  m.impl("linear", &linear);
  m.impl("linear_argmax", &linear_argmax);
  m.impl("stream", &stream);
}
