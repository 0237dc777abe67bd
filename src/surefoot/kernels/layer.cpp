// Decoder layers in one call: what lies between the products costs more to ask for than to compute.
//
// Nothing is computed here. The kernels are called as their modules in `targets/fused.py` would call them, in that order and
// on the same values, so that a layer's bits do not depend on which of the two ways it took.

#include "dispatch.hpp"
#include "product.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/ops/add.h>

#include <array>

using Maybe = optional<Tensor>;

namespace surefoot {

// What one layer holds. `norms`: of input, queries, keys, attention's result, feed-forward's input and its result; only the first
// and the fifth are always there.
struct DecoderLayer : torch::CustomClassHolder {
  std::array<Maybe, 6> norms;
  c10::intrusive_ptr<Product> qkv, output, gate_up, down;
  int64_t heads;
  double scaling, eps;
  bool unit_offset, gelu;
};

}  // namespace surefoot

namespace {

using surefoot::DecoderLayer;

Tensor rotated(const Tensor& x, const Tensor& cos, const Tensor& sin) {
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

struct Pass {  // as one layer sees it
  const Tensor &cos, &sin, &key_cache, &value_cache, &slots, &block_table, &row_slot, &kv_lens;
  int64_t block_size, window;  // 0: none
};

// x: [T, hidden] -> [T, hidden].
Tensor decoder_layer(const Tensor& x, const Pass& pass, const DecoderLayer& layer) {
  static const auto rms_norm =
      operation<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, double, bool, const Maybe&)>("surefoot::rms_norm");
  static const auto attend = operation<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                              const Tensor&, int64_t, double, optional<int64_t>, optional<double>, const Maybe&)>(
      "surefoot::paged_attention");
  static const auto activate = operation<Tensor(const Tensor&, bool)>("surefoot::gated_activation");
  const int64_t rows = x.size(0), kv_heads = pass.key_cache.size(1);
  const int64_t dim = pass.key_cache.size(2), value_dim = pass.value_cache.size(2);
  TORCH_CHECK(pass.key_cache.scalar_type() == x.scalar_type() && pass.value_cache.scalar_type() == x.scalar_type(),
              "the caches have x's dtype");
  const Tensor slots = pass.slots.contiguous();
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.numel() == rows, "slots is int64 [", rows, "]");
  const auto norm = [&](int which, const Tensor& y) {
    const Maybe& weight = layer.norms[which];
    return weight ? std::get<0>(rms_norm.call(y, *weight, layer.eps, layer.unit_offset, {})) : y;
  };

  const int64_t queries = layer.heads * dim, keys = kv_heads * dim, values = kv_heads * value_dim;
  TORCH_CHECK(layer.qkv->outputs == queries + keys + values, "the caches hold ", kv_heads, " heads of ", dim, " and ", value_dim,
              ", the layer gives ", layer.qkv->outputs, " features to ", layer.heads, " query heads and them");
  const Tensor parts = layer.qkv->linear(norm(0, x));
  const Tensor query = norm(1, parts.narrow(1, 0, queries).unflatten(1, {layer.heads, dim}));
  const Tensor key = norm(2, parts.narrow(1, queries, keys).unflatten(1, {kv_heads, dim}));
  keep(pass.key_cache, slots, rotated(key, pass.cos, pass.sin));
  keep(pass.value_cache, slots, parts.narrow(1, queries + keys, values).unflatten(1, {kv_heads, value_dim}));
  const optional<int64_t> window = pass.window ? optional<int64_t>(pass.window) : std::nullopt;
  const Tensor seen = attend.call(rotated(query, pass.cos, pass.sin), pass.key_cache, pass.value_cache, pass.block_table,
                                  pass.row_slot, pass.kv_lens, pass.block_size, layer.scaling, window, {}, {});
  const Tensor attention = norm(3, layer.output->linear(seen.flatten(1)));
  const auto [fed, total] = rms_norm.call(attention, *layer.norms[4], layer.eps, layer.unit_offset, x);
  return at::add(total, norm(5, layer.down->linear(activate.call(layer.gate_up->linear(fed), layer.gelu))));
}

c10::intrusive_ptr<DecoderLayer> make_layer(const c10::List<Maybe>& norms, const c10::List<c10::intrusive_ptr<Product>>& products,
                                            int64_t heads, double scaling, double eps, bool unit_offset, bool gelu) {
  TORCH_CHECK(norms.size() == 6 && norms.get(0) && norms.get(4), "a layer has six norms, of which four may be missing");
  TORCH_CHECK(products.size() == 4, "a layer has the products q·k·v, o, gate·up and down");
  auto layer = c10::make_intrusive<DecoderLayer>();
  for (size_t i = 0; i < 6; ++i) layer->norms[i] = norms.get(i);
  layer->qkv = products.get(0);
  layer->output = products.get(1);
  layer->gate_up = products.get(2);
  layer->down = products.get(3);
  TORCH_CHECK(layer->gate_up->outputs == 2 * layer->down->inputs, "gate·up gives twice what down reads");
  TORCH_CHECK(layer->qkv->inputs == layer->output->outputs && layer->qkv->inputs == layer->gate_up->inputs &&
                  layer->qkv->inputs == layer->down->outputs && heads > 0 && layer->output->inputs % heads == 0,
              "the products of a layer do not fit one another");
  layer->heads = heads;
  layer->scaling = scaling;
  layer->eps = eps;
  layer->unit_offset = unit_offset;
  layer->gelu = gelu;
  return layer;
}

// Lists by layer. cos, sin: [T, R].
Tensor decoder_layers(const Tensor& x, const c10::List<c10::intrusive_ptr<DecoderLayer>>& layers, at::TensorList cos,
                      at::TensorList sin, at::TensorList key_caches, at::TensorList value_caches, at::TensorList slots,
                      at::TensorList block_tables, const Tensor& row_slot, const Tensor& kv_lens, int64_t block_size,
                      at::IntArrayRef windows) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const size_t count = layers.size();
  for (const size_t size : {cos.size(), sin.size(), key_caches.size(), value_caches.size(), slots.size(), block_tables.size(),
                            windows.size()})
    TORCH_CHECK(size == count, "every list is of ", count, " layers, one is of ", size);
  Tensor hidden = x.contiguous();
  for (size_t i = 0; i < count; ++i) {
    const c10::intrusive_ptr<DecoderLayer> layer = layers.get(i);
    hidden = decoder_layer(hidden,
                           {cos[i], sin[i], key_caches[i], value_caches[i], slots[i], block_tables[i], row_slot, kv_lens,
                            block_size, windows[i]},
                           *layer);
  }
  return hidden;
}

}  // namespace

#define SUREFOOT_LAYER "__torch__.torch.classes.surefoot.DecoderLayer"

TORCH_LIBRARY_FRAGMENT(surefoot, m) {
  m.class_<DecoderLayer>("DecoderLayer");
  m.def(
      "decoder_layer(Tensor?[] norms, __torch__.torch.classes.surefoot.Product[] products, int heads, float scaling, float eps, "
      "bool unit_offset, bool gelu) -> " SUREFOOT_LAYER);
  m.def(
      "decoder_layers(Tensor x, " SUREFOOT_LAYER "[] layers, Tensor[] cos, Tensor[] sin, Tensor(a!)[] key_caches, "
      "Tensor(b!)[] value_caches, Tensor[] slots, Tensor[] block_tables, Tensor row_slot, Tensor kv_lens, int block_size, "
      "int[] windows) -> Tensor");
}

TORCH_LIBRARY_IMPL(surefoot, CPU, m) {
  m.impl("decoder_layer", &make_layer);
  m.impl("decoder_layers", &decoder_layers);
}
