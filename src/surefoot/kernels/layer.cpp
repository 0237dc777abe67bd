// A whole decoder layer in one call: what lies between the products costs more to ask for than to compute.
//
// Nothing is computed here. The kernels are called as their modules in `targets/fused.py` would call them, in that order and
// on the same values, so that a layer's bits do not depend on which of the two ways it took.

#include "dispatch.hpp"
#include "vectors.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>

namespace {

using Maybe = optional<Tensor>;

struct Product {  // of a PackedLinear
  const Tensor& weight;
  const Maybe &scale, &bias;
  Product(const std::vector<Maybe>& weights, int64_t first)
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

// x: [T, hidden] -> [T, hidden]. weights: norms of input, queries, keys, attention's result, feed-forward's input and its result;
// then weight, scale and bias of q·k·v, o, gate·up and down. Norms but the first and the fifth, scales and biases may be missing.
Tensor decoder_layer(const Tensor& x_, const Tensor& cos, const Tensor& sin, const Tensor& key_cache,
                     const Tensor& value_cache, const Tensor& slots_, const Tensor& block_table, const Tensor& row_slot,
                     const Tensor& kv_lens, int64_t block_size, double scaling, optional<int64_t> window, int64_t heads,
                     int64_t width, double eps, bool unit_offset, bool gelu, std::vector<Maybe> weights) {
  static const auto rms_norm =
      operation<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, double, bool, const Maybe&)>("surefoot::rms_norm");
  static const auto attend = operation<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                              const Tensor&, int64_t, double, optional<int64_t>, optional<double>, const Maybe&)>(
      "surefoot::paged_attention");
  static const auto activate = operation<Tensor(const Tensor&, bool)>("surefoot::gated_activation");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;

  TORCH_CHECK(weights.size() == 18, "18 weights, got ", weights.size());
  const Tensor x = x_.contiguous(), slots = slots_.contiguous();
  const int64_t rows = x.size(0), hidden = x.size(1), kv_heads = key_cache.size(1);
  const int64_t dim = key_cache.size(2), value_dim = value_cache.size(2);
  TORCH_CHECK(key_cache.scalar_type() == x.scalar_type() && value_cache.scalar_type() == x.scalar_type(),
              "the caches have x's dtype");
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.numel() == rows, "slots is int64 [", rows, "]");
  const auto norm = [&](const Maybe& weight, const Tensor& y) {
    return weight ? std::get<0>(rms_norm.call(y, *weight, eps, unit_offset, {})) : y;
  };
  const Product qkv(weights, 6), o(weights, 9), gate_up(weights, 12), down(weights, 15);

  const int64_t queries = heads * dim, keys = kv_heads * dim, values = kv_heads * value_dim;
  const Tensor parts = qkv(norm(weights[0], x), queries + keys + values);
  const Tensor query = norm(weights[1], parts.narrow(1, 0, queries).unflatten(1, {heads, dim}));
  const Tensor key = norm(weights[2], parts.narrow(1, queries, keys).unflatten(1, {kv_heads, dim}));
  keep(key_cache, slots, turned(key, cos, sin));
  keep(value_cache, slots, parts.narrow(1, queries + keys, values).unflatten(1, {kv_heads, value_dim}));
  const Tensor seen = attend.call(turned(query, cos, sin), key_cache, value_cache, block_table, row_slot, kv_lens, block_size,
                                  scaling, window, {}, {});
  const Tensor attention = norm(weights[3], o(seen.flatten(1), hidden));
  const auto [fed, total] = rms_norm.call(attention, weights[4].value(), eps, unit_offset, x);
  return at::add(total, norm(weights[5], down(activate.call(gate_up(fed, 2 * width), gelu), hidden)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(surefoot, m) {
  m.def(
      "decoder_layer(Tensor x, Tensor cos, Tensor sin, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots, "
      "Tensor block_table, Tensor row_slot, Tensor kv_lens, int block_size, float scaling, int? window, int heads, int width, "
      "float eps, bool unit_offset, bool gelu, Tensor?[] weights) -> Tensor");
}

TORCH_LIBRARY_IMPL(surefoot, CPU, m) { m.impl("decoder_layer", &decoder_layer); }
