// Decoder layers in one call: what lies between the products costs more to ask for than to compute.
//
// Nothing is computed here. The kernels are called as their modules in `targets/fused.py` would call them, in that order and
// on the same values, so that a layer's bits do not depend on which of the two ways it took.

#include "dispatch.hpp"
#include "vectors.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>

namespace {

using Maybe = optional<Tensor>;
constexpr size_t WEIGHTS = 18;  // of a layer

struct Product {  // of a PackedLinear
  const Tensor& weight;
  const Maybe &scale, &bias;
  Product(const Maybe* weights, int64_t first)
      : weight(weights[first].value()), scale(weights[first + 1]), bias(weights[first + 2]) {}
  Tensor operator()(const Tensor& x, int64_t outputs) const {
    static const auto linear =
        operation<Tensor(const Tensor&, const Tensor&, int64_t, const Maybe&, const Maybe&)>("surefoot::linear");
    return linear.call(x, weight, outputs, scale, bias);
  }
};

Tensor turned(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  static const auto rotary = operation<Tensor(const Tensor&, const Tensor&, const Tensor&)>("surefoot::rotary");
  return rotary.call(x, cos, sin);
}

// cache[slots[t]] = rows[t]; rows: [T, H, D], dense in its last dimension, cache: [N, H, D] with dense slots.
void keep(const Tensor& cache, const Tensor& slots, const Tensor& rows) {
  const int64_t heads = rows.size(1), bytes = rows.size(2) * rows.element_size(), size = rows.element_size();
  const auto* from = (const char*)rows.const_data_ptr();
  auto* to = (char*)cache.mutable_data_ptr();
  for (int64_t t = 0; t < rows.size(0); ++t) {
    const int64_t slot = slots.const_data_ptr<int64_t>()[t];
    TORCH_CHECK(0 <= slot && slot < cache.size(0), "cache slot ", slot, " of ", cache.size(0));
    for (int64_t h = 0; h < heads; ++h)
      std::memcpy(to + (slot * cache.stride(0) + h * cache.stride(1)) * size,
                  from + (t * rows.stride(0) + h * rows.stride(1)) * size, bytes);
  }
}

struct Shape {  // the same for all layers of a call
  int64_t heads, width;
  double eps;
  bool unit_offset, gelu;
};

struct Pass {  // as one layer sees it
  const Tensor &cos, &sin, &key_cache, &value_cache, &slots, &block_table, &row_slot, &kv_lens;
  int64_t block_size, window;  // 0: none
  double scaling;
};

// x: [T, hidden] -> [T, hidden]. weights: norms of input, queries, keys, attention's result, feed-forward's input and its result;
// then weight, scale and bias of q·k·v, o, gate·up and down. Norms but the first and the fifth, scales and biases may be missing.
Tensor decoder_layer(const Tensor& x, const Pass& pass, const Shape& shape, const Maybe* weights) {
  static const auto rms_norm =
      operation<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, double, bool, const Maybe&)>("surefoot::rms_norm");
  static const auto attend = operation<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                              const Tensor&, int64_t, double, optional<int64_t>, optional<double>, const Maybe&)>(
      "surefoot::paged_attention");
  static const auto activate = operation<Tensor(const Tensor&, bool)>("surefoot::gated_activation");
  const int64_t rows = x.size(0), hidden = x.size(1), kv_heads = pass.key_cache.size(1);
  const int64_t dim = pass.key_cache.size(2), value_dim = pass.value_cache.size(2);
  TORCH_CHECK(pass.key_cache.scalar_type() == x.scalar_type() && pass.value_cache.scalar_type() == x.scalar_type(),
              "the caches have x's dtype");
  const Tensor slots = pass.slots.contiguous();
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.numel() == rows, "slots is int64 [", rows, "]");
  const auto norm = [&](const Maybe& weight, const Tensor& y) {
    return weight ? std::get<0>(rms_norm.call(y, *weight, shape.eps, shape.unit_offset, {})) : y;
  };
  const Product qkv(weights, 6), o(weights, 9), gate_up(weights, 12), down(weights, 15);

  const int64_t queries = shape.heads * dim, keys = kv_heads * dim, values = kv_heads * value_dim;
  const Tensor parts = qkv(norm(weights[0], x), queries + keys + values);
  const Tensor query = norm(weights[1], parts.narrow(1, 0, queries).unflatten(1, {shape.heads, dim}));
  const Tensor key = norm(weights[2], parts.narrow(1, queries, keys).unflatten(1, {kv_heads, dim}));
  keep(pass.key_cache, slots, turned(key, pass.cos, pass.sin));
  keep(pass.value_cache, slots, parts.narrow(1, queries + keys, values).unflatten(1, {kv_heads, value_dim}));
  const optional<int64_t> window = pass.window ? optional<int64_t>(pass.window) : std::nullopt;
  const Tensor seen = attend.call(turned(query, pass.cos, pass.sin), pass.key_cache, pass.value_cache, pass.block_table,
                                  pass.row_slot, pass.kv_lens, pass.block_size, pass.scaling, window, {}, {});
  const Tensor attention = norm(weights[3], o(seen.flatten(1), hidden));
  const auto [fed, total] = rms_norm.call(attention, weights[4].value(), shape.eps, shape.unit_offset, x);
  return at::add(total, norm(weights[5], down(activate.call(gate_up(fed, 2 * shape.width), shape.gelu), hidden)));
}

// Lists by layer, WEIGHTS of `weights` each. cos, sin: [T, R].
Tensor decoder_layers(const Tensor& x, at::TensorList cos, at::TensorList sin, at::TensorList key_caches,
                      at::TensorList value_caches, at::TensorList slots, at::TensorList block_tables, const Tensor& row_slot,
                      const Tensor& kv_lens, int64_t block_size, at::ArrayRef<double> scalings, at::IntArrayRef windows,
                      int64_t heads, int64_t width, double eps, bool unit_offset, bool gelu, std::vector<Maybe> weights) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const size_t layers = cos.size();
  for (const size_t size : {sin.size(), key_caches.size(), value_caches.size(), slots.size(), block_tables.size(),
                            scalings.size(), windows.size(), weights.size() / WEIGHTS})
    TORCH_CHECK(size == layers, "every list is of ", layers, " layers, one is of ", size);
  TORCH_CHECK(weights.size() == layers * WEIGHTS, WEIGHTS, " weights a layer, got ", weights.size());
  Tensor hidden = x.contiguous();
  for (size_t i = 0; i < layers; ++i)
    hidden = decoder_layer(hidden,
                           {cos[i], sin[i], key_caches[i], value_caches[i], slots[i], block_tables[i], row_slot, kv_lens,
                            block_size, windows[i], scalings[i]},
                           {heads, width, eps, unit_offset, gelu}, weights.data() + i * WEIGHTS);
  return hidden;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(surefoot, m) {
  m.def(
      "decoder_layers(Tensor x, Tensor[] cos, Tensor[] sin, Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, "
      "Tensor[] slots, Tensor[] block_tables, Tensor row_slot, Tensor kv_lens, int block_size, float[] scalings, "
      "int[] windows, int heads, int width, float eps, bool unit_offset, bool gelu, Tensor?[] weights) -> Tensor");
}

TORCH_LIBRARY_IMPL(surefoot, CPU, m) { m.impl("decoder_layers", &decoder_layers); }
