// A product y = x W^T as a handle: what is packed, and how it is multiplied by, decided once.
//
// A linear layer, a decoder layer and the drafter's head hold a `Product` and do not know the format of its weights. A format is a class derived from it; where the weights come panel by panel, `PanelProduct` (panels.hpp) is that
// class, and a struct that gives one panel's weights is all there is to write.

#pragma once

#include "vectors.hpp"

#include <torch/custom_class.h>

#include <functional>

namespace SUREFOOT_NAMESPACE {

// x [count, inputs] of either dtype. Not a template parameter of the products, which would be compiled twice otherwise.
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

// Where finished sums go: emit(thread, row, first output, sums, how many).
using Emit = std::function<void(int, int64_t, int64_t, const float*, int)>;

class Product : public torch::CustomClassHolder {
 public:
  // scale, bias: [N] float32, applied to the sums in this order.
  Product(int64_t inputs, int64_t outputs, const optional<Tensor>& scale, const optional<Tensor>& bias)
      : inputs(inputs), outputs(outputs) {
    TORCH_CHECK(inputs > 0 && outputs > 0, "a product has inputs and outputs, got ", inputs, " and ", outputs);
    for (const auto* t : {&scale, &bias})
      TORCH_CHECK(!t->has_value() || ((*t)->scalar_type() == at::kFloat && (*t)->numel() == outputs && (*t)->is_contiguous()),
                  "scale and bias are contiguous float32 [", outputs, "]");
    if (scale) scale_ = *scale;
    if (bias) bias_ = *bias;
  }

  const int64_t inputs, outputs;

  // y[..., N] = x[..., K] W^T * scale + bias, in x's dtype.
  Tensor linear(const Tensor& x_) const {
    const Tensor x = x_.contiguous();
    const Rows rows = rows_of(x);
    auto shape = x.sizes().vec();
    shape.back() = outputs;
    Tensor y = at::empty(shape, x.options());
    with_dtype(y, [&](auto* to) {
      multiply(rows, [&](int, int64_t row, int64_t n, const float* acc, int width) {
        for (int i = 0; i < width && n < outputs; i += LANES, n += LANES)
          write(to + row * outputs + n, finished(load<V>(acc + i), n), outputs - n);
      });
    });
    return y;
  }

  // Index and value of the largest output of each row of x [M, K], without writing the outputs; ties go to the smallest index.
  // Values are rounded to x's dtype first, so that the choice equals argmax(linear(x)).
  std::tuple<Tensor, Tensor> argmax(const Tensor& x_) const {
    const Tensor x = x_.contiguous();
    TORCH_CHECK(x.dim() == 2, "x is [M, K], got ", x.sizes());
    const Rows given = rows_of(x);
    const int64_t rows = given.count, threads = at::get_num_threads();
    Tensor index = at::empty({rows}, x.options().dtype(at::kLong)), value = at::empty({rows}, x.options().dtype(at::kFloat));
    using Best = std::pair<float, int64_t>;
    const auto better = [](const Best& a, const Best& b) { return a.first > b.first || (a.first == b.first && a.second < b.second); };
    std::vector<Best> best(threads * rows, Best(-std::numeric_limits<float>::infinity(), outputs));
    with_dtype(x, [&](auto* from) {
      multiply(given, [&](int thread, int64_t row, int64_t n, const float* acc, int width) {
        Best& b = best[thread * rows + row];
        for (int i = 0; i < width && n < outputs; i += LANES, n += LANES) {
          const V v = rounded(from, finished(load<V>(acc + i), n));
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

 protected:
  // Gives every output of every row to `emit` once, each summed in an order fixed by the number of inputs alone.
  virtual void multiply(const Rows& x, const Emit& emit) const = 0;

 private:
  Rows rows_of(const Tensor& x) const {
    TORCH_CHECK(x.dim() > 0 && x.size(-1) == inputs, "this product reads ", inputs, " features, x is ", x.sizes());
    return {x.const_data_ptr(), x.scalar_type() == at::kBFloat16, x.numel() / inputs, inputs};
  }
  V finished(V v, int64_t n) const {  // the outputs from n on
    if (scale_.defined()) v = v * read(scale_.const_data_ptr<float>() + n, outputs - n);
    if (bias_.defined()) v = v + read(bias_.const_data_ptr<float>() + n, outputs - n);
    return v;
  }

  Tensor scale_, bias_;
};

}  // namespace SUREFOOT_NAMESPACE

namespace {
using SUREFOOT_NAMESPACE::Emit;
using SUREFOOT_NAMESPACE::Product;
using SUREFOOT_NAMESPACE::Rows;
}  // namespace
