// A weight format from outside of the package: symmetric 4 bits, two outputs of a panel in a byte. What a format has to bring in
// C++ is this struct and the operators that pack and make the product.

#include "panels.hpp"

namespace {

struct NibblePanel : FloatWeights {  // byte j of an input: output j in the low half, output j + LANES in the high one
  using Element = uint8_t;
  static constexpr int64_t BYTES = PANEL / 2;  // of one input
  const uint8_t* w;
  NibblePanel(const uint8_t* w, int64_t depth, int64_t panel) : w(w + panel * depth * LANES) {}
  void get(int64_t k, V& lo, V& hi) const {
    UNROLL for (int j = 0; j < LANES; ++j) {
      lo[j] = (float)((int)(w[k * LANES + j] & 15) - 8);
      hi[j] = (float)((int)(w[k * LANES + j] >> 4) - 8);
    }
  }
};

// values [N, K] int8 in -7 ... 7, lying side by side.
Tensor pack_nibbles(const Tensor& values_) {
  const Tensor values = values_.contiguous();
  const int64_t outputs = values.size(0), inputs = values.size(1), panels = (outputs + PANEL - 1) / PANEL;
  Tensor packed = at::empty({panels, inputs, LANES}, values.options().dtype(at::kByte));
  const auto nibble = [&](int64_t n, int64_t k) {
    return n < outputs ? values.const_data_ptr<int8_t>()[n * inputs + k] + 8 : 8;
  };
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t k = 0; k < inputs; ++k)
      for (int64_t j = 0; j < LANES; ++j)
        packed.mutable_data_ptr<uint8_t>()[(p * inputs + k) * LANES + j] =
            (uint8_t)(nibble(p * PANEL + j, k) | nibble(p * PANEL + LANES + j, k) << 4);
  return packed;
}

c10::intrusive_ptr<Product> nibble_product(const Tensor& packed, int64_t inputs, int64_t outputs, const optional<Tensor>& scale,
                                           const optional<Tensor>& bias) {
  TORCH_CHECK(packed.scalar_type() == at::kByte && packed.numel() == (outputs + PANEL - 1) / PANEL * inputs * LANES,
              "no nibbles for ", inputs, " features and ", outputs, " outputs");
  return c10::make_intrusive<SUREFOOT_NAMESPACE::PanelProduct<NibblePanel>>(packed, inputs, outputs, scale, bias);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(surefoot, m) {
  m.def("pack_nibbles(Tensor values) -> Tensor");
  m.def(
      "nibble_product(Tensor packed, int inputs, int outputs, Tensor? scale, Tensor? bias) -> "
      "__torch__.torch.classes.surefoot.Product");
}

TORCH_LIBRARY_IMPL(surefoot, CPU, m) {
  m.impl("pack_nibbles", &pack_nibbles);
  m.impl("nibble_product", &nibble_product);
}
