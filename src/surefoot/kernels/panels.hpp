// Products over weights that lie panel by panel: the loops, the handle, and how a panel is filled.
//
// A panel is PANEL outputs side by side, input after input. A format says in one struct how the weights of a panel are read:
//
//   struct MyPanel : FloatWeights {            // or with an `Input`, `spread` and `add` of its own
//     using Element = uint8_t;                 // what the packed tensor holds
//     static constexpr int64_t BYTES = ...;    // of one input in a panel
//     MyPanel(const Element* w, int64_t depth, int64_t panel);
//     void get(int64_t k, V& lo, V& hi) const;  // input k: outputs 0..LANES-1 and LANES..PANEL-1 of the panel
//   };

#pragma once

#include "product.hpp"

#include <ATen/ops/from_blob.h>

#include <memory>
#include <mutex>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t K_CHUNK = 128;   // inputs of a panel handled for all rows before moving on: stays in the L1 cache
constexpr int64_t ROW_BLOCK = 48;  // rows per reading of the weights: far more arithmetic than the reading hides
constexpr int FEW_ROWS = 2;  // up to so many leave room in the registers for a second panel, and need its chains

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

}  // namespace

namespace SUREFOOT_NAMESPACE {

// A product over panels of one kind; `packed` is kept alive by it.
template <class W>
class PanelProduct : public Product {
 public:
  PanelProduct(const Tensor& packed, int64_t inputs, int64_t outputs, const optional<Tensor>& scale, const optional<Tensor>& bias)
      : Product(inputs, outputs, scale, bias), packed_(packed), panels_((outputs + PANEL - 1) / PANEL) {
    TORCH_CHECK(packed.is_contiguous(), "packed weights are contiguous");
  }

 protected:
  void multiply(const Rows& x, const Emit& emit) const override {
    product<W>(x, (const typename W::Element*)packed_.const_data_ptr(), panels_, emit);
  }

 private:
  Tensor packed_;
  int64_t panels_;
};

}  // namespace SUREFOOT_NAMESPACE

namespace {

// ------------------------------------------------------------------------------------------------ packing

// Packs the rows of all weights, one after the other, panel by panel and 32 inputs at a time through a block that stays in the
// cache. `place(output, input)` says where in the block of 32 inputs an element goes; `pad` is what the number of inputs is
// rounded up to.
template <int64_t OUTPUTS, class E, class Place>
void interleave(const std::vector<Tensor>& weights, E* to, int64_t panels, int64_t inputs, int64_t pad, Place place) {
  const int64_t padded = (inputs + pad - 1) / pad * pad;
  split(panels, panels * OUTPUTS * inputs, [&](int64_t first, int64_t last) {  // first touch by the thread that will read
    size_t which = 0;
    int64_t before = 0;  // outputs of the weights before `which`
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
// Memory of packed weights: one tensor after the other in mappings that begin on a huge page. A layer's weights are a few
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
    madvise(begin, size, MADV_HUGEPAGE);  // where the system grants it
  }
  ~Mapping() { munmap(all, reserved); }
};

Tensor lasting(const std::vector<int64_t>& shape, const at::TensorOptions& options) {
  static std::mutex alone;
  static std::weak_ptr<Mapping> latest;  // lives as long as its tensors
  size_t bytes = options.dtype().itemsize();
  for (const int64_t extent : shape) bytes *= extent;
  const size_t page = sysconf(_SC_PAGESIZE);  // whole pages are given back: no two tensors share one
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

}  // namespace
