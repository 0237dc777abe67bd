// The formats of weights that this library reads, and the operations on them. y = x W^T is thin: reading the weights is what it
// costs.
//
// A packed weight is laid out for one way of computing and carries that in its shape:
//   panels  [panels, K, PANEL]           bfloat16, float32 or int8; widened to float vectors, fused multiply-adds
//   pairs   [panels, K / 2, PANEL, 2]    bfloat16; AVX-512's dot products over pairs of inputs
//   tiles   [panels, K / 32, 2, 16, 32]  bfloat16 or int8; AMX: a panel of 32 outputs is two tiles of 16 pairs x 16 outputs
// (bfloat16 is held as int16; missing inputs and outputs are zeros.)
//
// Every output is summed in an order fixed by the number of inputs alone. See the rule in vectors.hpp. Another format is one
// struct and one operator that makes its `Product`, in this library or in one of its own (tests/kernels/nibbles.cpp).

#include "panels.hpp"
#include "tiles.hpp"

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

#if SUREFOOT_TILES
// Two ways to read the same bytes: `Half` for rows of bfloat16, `Wide` for rows of float32.
template <class Half, class Wide>
class PairProduct : public Product {
 public:
  PairProduct(const Tensor& packed, int64_t inputs, int64_t outputs, const optional<Tensor>& scale, const optional<Tensor>& bias)
      : Product(inputs, outputs, scale, bias), packed_(packed) {}

 protected:
  void multiply(const Rows& x, const Emit& emit) const override {
    const auto* w = (const typename Wide::Element*)packed_.const_data_ptr();
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    if (!x.half) return product<Wide>(x, w, panels, emit);
    if constexpr (std::is_same_v<Half, void>)
      tiled_product(x, w, packed_.size(0), emit);
    else
      product<Half>(x, w, panels, emit);
  }

 private:
  Tensor packed_;
};
#endif

using Handle = c10::intrusive_ptr<Product>;

// The product that the layout and the dtype of a packed weight call for.
Handle product_of(const Tensor& packed, int64_t inputs, int64_t outputs, const optional<Tensor>& scale,
                  const optional<Tensor>& bias) {
  const auto type = packed.scalar_type();
  const int64_t dims = packed.dim();
  const auto has = [&](int64_t width, int64_t depth) {
    return packed.size(0) == (outputs + width - 1) / width && packed.size(1) == depth;
  };
  TORCH_CHECK(packed.is_contiguous(), "packed weights are contiguous");
  using namespace SUREFOOT_NAMESPACE;
  if (dims == 3 && packed.size(2) == PANEL && has(PANEL, inputs)) {
    if (type == at::kShort) return c10::make_intrusive<PanelProduct<Bf16Panel>>(packed, inputs, outputs, scale, bias);
    if (type == at::kFloat) return c10::make_intrusive<PanelProduct<F32Panel>>(packed, inputs, outputs, scale, bias);
    if (type == at::kChar) return c10::make_intrusive<PanelProduct<Int8Panel>>(packed, inputs, outputs, scale, bias);
  }
#if SUREFOOT_TILES
  if (dims == 4 && type == at::kShort && packed.size(2) == PANEL && packed.size(3) == 2 && has(PANEL, (inputs + 1) / 2)) {
    static const std::string missing = dots_missing();
    TORCH_CHECK(missing.empty(), "weight was packed for AVX-512 BF16: ", missing);
    return c10::make_intrusive<PairProduct<PairPanel, WidenedPairs>>(packed, inputs, outputs, scale, bias);
  }
  if (dims == 5 && packed.numel() == packed.size(0) * packed.size(1) * 2 * TILE && has(32, (inputs + 31) / 32)) {
    TORCH_CHECK(tiles_missing().empty(), "weight was packed for AMX: ", tiles_missing());
    if (type == at::kChar)
      return c10::make_intrusive<PairProduct<void, WidenedTiles<int8_t>>>(packed, inputs, outputs, scale, bias);
    if (type == at::kShort)
      return c10::make_intrusive<PairProduct<void, WidenedTiles<uint16_t>>>(packed, inputs, outputs, scale, bias);
  }
#endif
  TORCH_CHECK(false, "no product of these kernels reads a weight ", packed.sizes(), " of dtype ", type, " for ", inputs,
              " features and ", outputs, " outputs");
}

// The same with the tensors at hand, for tracers, which see tensors only.
Tensor linear(const Tensor& x, const Tensor& packed, int64_t outputs, const optional<Tensor>& scale,
              const optional<Tensor>& bias) {
  return product_of(packed, x.size(-1), outputs, scale, bias)->linear(x);
}
std::tuple<Tensor, Tensor> linear_argmax(const Tensor& x, const Tensor& packed, int64_t outputs, const optional<Tensor>& scale,
                                         const optional<Tensor>& bias) {
  return product_of(packed, x.size(-1), outputs, scale, bias)->argmax(x);
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

// Whether the number of threads follows the competition for the cores (`Competition`); returns whether it did. For comparisons.
bool adapt_threads(bool adapt) { return SUREFOOT_NAMESPACE::adaptive.exchange(adapt); }

// How often the calling thread has gone on alone since the start.
int64_t thread_pauses() { return SUREFOOT_NAMESPACE::competition.pauses(); }

// What `Competition` does about pieces of work [N, 3] int64 (when it begins, how long it takes and how long its first thread
// waits, in nanoseconds): whether all threads take part in each, [N] bool.
Tensor simulate_competition(int64_t threads, const Tensor& work_) {
  const Tensor work = work_.contiguous();
  TORCH_CHECK(work.scalar_type() == at::kLong && work.dim() == 2 && work.size(1) == 3, "work is int64 [N, 3]");
  Tensor together = at::empty({work.size(0)}, at::kBool);
  SUREFOOT_NAMESPACE::Competition competition;
  for (int64_t i = 0; i < work.size(0); ++i) {
    const int64_t* piece = work.const_data_ptr<int64_t>() + i * 3;
    const bool all = together.mutable_data_ptr<bool>()[i] = competition.together(piece[0]);
    if (all) competition.account((int)threads, piece[0] + piece[1], piece[1], piece[2]);
  }
  return together;
}

}  // namespace

#define SUREFOOT_STRING_(x) #x
#define SUREFOOT_STRING(x) SUREFOOT_STRING_(x)
#define SUREFOOT_PRODUCT "__torch__.torch.classes." SUREFOOT_STRING(SUREFOOT_NAMESPACE) ".Product"

TORCH_LIBRARY_FRAGMENT(SUREFOOT_NAMESPACE, m) {
  m.class_<Product>("Product")
      .def("linear", [](const Handle& self, const Tensor& x) { return self->linear(x); })
      .def("argmax", [](const Handle& self, const Tensor& x) { return self->argmax(x); });
  m.def("pack(Tensor[] weights, str layout) -> Tensor");
  m.def("product(Tensor packed, int inputs, int outputs, Tensor? scale, Tensor? bias) -> " SUREFOOT_PRODUCT);
  m.def("linear(Tensor x, Tensor packed, int outputs, Tensor? scale, Tensor? bias) -> Tensor");
  m.def("linear_argmax(Tensor x, Tensor packed, int outputs, Tensor? scale, Tensor? bias) -> (Tensor, Tensor)");
  m.def("stream(Tensor data) -> int");
  m.def("layout_missing(str layout) -> str", &layout_missing);
  m.def("adapt_threads(bool adapt) -> bool", &adapt_threads);
  m.def("thread_pauses() -> int", &thread_pauses);
  m.def("simulate_competition(int threads, Tensor work) -> Tensor");
}

TORCH_LIBRARY_IMPL(SUREFOOT_NAMESPACE, CPU, m) {
  m.impl("pack", &pack);
  m.impl("product", &product_of);
  m.impl("linear", &linear);
  m.impl("linear_argmax", &linear_argmax);
  m.impl("stream", &stream);
  m.impl("simulate_competition", &simulate_competition);
}
