// The sequential half of a draft pass: the tokens of a block, drawn left to right, in one call.
//
// Position k adds to the block's base logits a correction that depends on the token before it, draws x_k, and goes on.
// Products, softmax and draws are the operators of native.cpp, called from here: what is computed is bit for bit what the
// same steps give from Python, and a row's results depend on that row alone. What is saved is a dozen trips through
// Python and torch at every position, and passes over the logits.

#include "dispatch.hpp"
#include "product.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/util/BFloat16.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

namespace {

constexpr int WIDE = 16;  // entries handled at once; the compiler makes vectors of them
constexpr float NONE = -std::numeric_limits<float>::infinity();

// f(row) for every row, on as many threads as torch uses; small work stays on the calling thread.
template <class F>
void each_row(int64_t rows, int64_t work, F f) {
  split(rows, work, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) f(row);
  });
}

inline float greater(float a, float b) { return a > b ? a : b; }

// to = base + bias, and the index of its first largest entry; -1 where NaN or infinity is among them, or nothing above
// -infinity. `bias` null: base alone.
template <class A, class B>
int64_t corrected(const A* base, const B* bias, float* to, int64_t size) {
  float best[WIDE];
  int32_t unsound[WIDE] = {};
  std::fill_n(best, WIDE, NONE);
  const auto take = [&](int64_t i, int lane) {
    const float v = bias ? (float)base[i] + (float)bias[i] : (float)base[i];
    to[i] = v;
    best[lane] = greater(best[lane], v);
    unsound[lane] |= !(v < -NONE);
  };
  int64_t i = 0;
  for (; i + WIDE <= size; i += WIDE)
    for (int lane = 0; lane < WIDE; ++lane) take(i + lane, lane);
  for (; i < size; ++i) take(i, 0);
  const float most = *std::max_element(best, best + WIDE);
  if (most == NONE || std::find(unsound, unsound + WIDE, 1) != unsound + WIDE) return -1;
  return std::find(to, to + size, most) - to;
}

template <class F>
void with_floating(const Tensor& t, F f) {
  if (t.scalar_type() == at::kBFloat16)
    f((const BFloat16*)t.const_data_ptr());
  else if (t.scalar_type() == at::kFloat)
    f((const float*)t.const_data_ptr());
  else
    TORCH_CHECK(false, "draft_block takes bfloat16 or float32, got ", t.scalar_type());
}

// The copies of one request: the token after the longest earlier occurrence of the text's suffix, the latest of equals. See
// drafters/copying.py, whose `Copier` does the same with tensors.
class Copier {
 public:
  Copier(const int64_t* text, int64_t size, int64_t longest) : text_(text, text + size), matched_(size, 0), longest_(longest) {
    const int64_t* const last = text + size - 1;
    for (int64_t j = 0; j + 1 < size; ++j) {
      int64_t length = 0;
      while (length < longest && length <= j && text[j - length] == last[-length]) ++length;
      matched_[j] = length;
    }
  }
  std::pair<int64_t, int64_t> copy() const {  // token and length of the match; length 0: none
    int64_t best = 0;
    for (int64_t j = 0; j + 1 < (int64_t)text_.size(); ++j)
      if (matched_[j] >= matched_[best]) best = j;
    return {matched_[best] ? text_[best + 1] : -1, matched_[best]};
  }
  void append(int64_t token) {
    for (int64_t j = (int64_t)text_.size() - 1; j >= 0; --j)
      matched_[j] = text_[j] == token ? std::min(j ? matched_[j - 1] : 0, longest_ - 1) + 1 : 0;
    text_.push_back(token);
    matched_.push_back(0);
  }

 private:
  std::vector<int64_t> text_, matched_;
  int64_t longest_;
};

// Draws a block of G tokens for R requests.
//   base [R, G, V]: logits before the correction. anchors [R]: target ids, the tokens before the blocks.
//   table [V_target, r], product: the sequential head's W1, and its W2; or neither.
//   vocabulary [V]: target id of every draft id, or none for the identity.
//   temperature [R], uniforms [R, G]: for draws; without them the largest logit is taken. sharpness [G]: position k draws at
//   temperature / sharpness[k].
//   history [S, L], slots [R], lengths [R], shares [longest match + 1], columns [V_target] (none: the identity): the logit of the
//   copy is raised until it has its share; or none of them.
// Returns draft ids [R, G] (-1 where logits hold NaN or infinity, or nothing above -infinity), the largest probabilities [R, G] of
// the corrected logits at temperature 1, and the distributions [R, G, V] that were drawn from ([0] without draws).
std::tuple<Tensor, Tensor, Tensor> draft_block(const Tensor& base_, const Tensor& anchors, const optional<Tensor>& table_,
                                               const optional<c10::intrusive_ptr<Product>>& product_,
                                               const optional<Tensor>& vocabulary_, const optional<Tensor>& temperature,
                                               const optional<Tensor>& uniforms, const optional<Tensor>& top_k,
                                               const optional<Tensor>& top_p, const optional<Tensor>& min_p,
                                               const optional<Tensor>& sharpness, const optional<Tensor>& history,
                                               const optional<Tensor>& slots_, const optional<Tensor>& lengths_,
                                               const optional<Tensor>& shares_, const optional<Tensor>& columns_) {
  static const auto softmax = operation<Tensor(const Tensor&, const Tensor&)>("surefoot::softmax_rows");
  static const auto filter = operation<void(Tensor&, const optional<Tensor>&, const optional<Tensor>&,
                                            const optional<Tensor>&)>("surefoot::filter_rows_");
  static const auto sample = operation<Tensor(const Tensor&, const Tensor&)>("surefoot::sample_rows");
  TORCH_CHECK(base_.dim() == 3 && anchors.numel() == base_.size(0) && anchors.scalar_type() == at::kLong,
              "base is [R, G, V], anchors int64 [R]");
  TORCH_CHECK(table_.has_value() == product_.has_value() && temperature.has_value() == uniforms.has_value(),
              "the sequential head's two tables, and temperature and uniforms, come together");
  const Tensor base = base_.contiguous(), table = table_ ? table_->contiguous() : Tensor();
  const Tensor vocabulary = vocabulary_ ? vocabulary_->contiguous() : Tensor();
  const int64_t rows = base.size(0), length = base.size(1), size = base.size(2);
  TORCH_CHECK(!product_ || ((*product_)->outputs == size && table.dim() == 2), "the sequential head corrects ", size, " logits");
  TORCH_CHECK(!vocabulary_ || (vocabulary.numel() == size && vocabulary.scalar_type() == at::kLong),
              "vocabulary is int64 [", size, "]");
  TORCH_CHECK(!sharpness || sharpness->numel() >= length, "sharpness is [", length, "]");
  TORCH_CHECK(history.has_value() == shares_.has_value() && history.has_value() == slots_.has_value() &&
                  history.has_value() == lengths_.has_value(),
              "history, slots, lengths and shares come together");
  const Tensor shares = shares_ ? shares_->contiguous() : Tensor(), columns = columns_ ? columns_->contiguous() : Tensor();
  std::vector<Copier> copiers;
  if (history) {
    for (const Tensor* t : {&*history, &*slots_, &*lengths_})
      TORCH_CHECK(t->scalar_type() == at::kLong, "history, slots and lengths are int64");
    TORCH_CHECK(history->stride(1) == 1, "rows of the history are dense");
    const Tensor slots = slots_->contiguous(), lengths = lengths_->contiguous();
    TORCH_CHECK(slots.numel() == rows && lengths.numel() == rows && shares.scalar_type() == at::kFloat && shares.numel() > 1 &&
                    (!columns_ || columns.scalar_type() == at::kLong),
                "slots and lengths are [", rows, "], shares float32, columns int64");
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t slot = slots.const_data_ptr<int64_t>()[r], length = lengths.const_data_ptr<int64_t>()[r];
      TORCH_CHECK(slot >= 0 && slot < history->size(0) && length >= 0 && length < history->size(1), "a request outside the history");
      copiers.emplace_back(history->const_data_ptr<int64_t>() + slot * history->stride(0), length + 1, shares.numel() - 1);
    }
  }
  const bool drawn = temperature.has_value(), filtered = top_k || top_p || min_p;
  const auto floats = base.options().dtype(at::kFloat), ints = anchors.options();
  Tensor ids = at::empty({rows, length}, ints), largest = at::empty({rows, length}, floats);
  const Tensor one = at::ones({rows}, floats);
  Tensor probs = drawn ? at::empty({rows, length, size}, floats) : at::empty({0}, floats);
  Tensor logits = at::empty({rows, size}, floats), previous = anchors.contiguous().clone();
  int64_t* before = previous.mutable_data_ptr<int64_t>();

  for (int64_t k = 0; k < length; ++k) {
    Tensor bias;
    if (table_) {
      const int64_t rank = table.size(1), bytes = rank * table.element_size();
      Tensor latent = at::empty({rows, rank}, table.options());
      for (int64_t r = 0; r < rows; ++r) {
        TORCH_CHECK(before[r] >= 0 && before[r] < table.size(0), "token ", before[r], " is outside the table");
        std::memcpy((char*)latent.mutable_data_ptr() + r * bytes, (const char*)table.const_data_ptr() + before[r] * bytes, bytes);
      }
      bias = (*product_)->linear(latent);
    }
    int64_t* id = ids.mutable_data_ptr<int64_t>();
    float* to = logits.mutable_data_ptr<float>();
    with_floating(base, [&](auto* from) {
      with_floating(bias.defined() ? bias : base, [&](auto* add) {
        each_row(rows, rows * size, [&](int64_t r) {
          const auto* bias_row = bias.defined() ? add + r * size : nullptr;
          id[r * length + k] = corrected(from + (r * length + k) * size, bias_row, to + r * size, size);
        });
      });
    });
    Tensor plain = softmax.call(logits, one);
    bool raised = false;
    for (int64_t r = 0; r < (int64_t)copiers.size(); ++r) {
      const auto [token, match] = copiers[r].copy();
      const float share = shares.const_data_ptr<float>()[match];
      TORCH_CHECK(!columns_ || token < columns.numel(), "token ", token, " has no column");
      const int64_t column = token < 0 || !columns_ ? token : columns.const_data_ptr<int64_t>()[token];
      int64_t& chosen = id[r * length + k];
      if (share == 0 || column < 0 || column >= size || chosen < 0) continue;
      const float* p = plain.const_data_ptr<float>() + r * size;
      const float best = to[r * size + chosen];
      float* logit = to + r * size + column;
      const double odds = share / (1.0 - share);  // in float64, for the bits of `raise_copies`
      *logit = (float)(best - std::log((double)p[chosen]) + std::log(p[column] + odds));
      if (*logit > best || (*logit == best && column < chosen)) chosen = column;
      raised = true;
    }
    if (raised) plain = softmax.call(logits, one);
    for (int64_t r = 0; r < rows; ++r)
      largest.mutable_data_ptr<float>()[r * length + k] =
          plain.const_data_ptr<float>()[r * size + std::max<int64_t>(id[r * length + k], 0)];
    if (drawn) {
      Tensor q = softmax.call(logits, sharpness ? at::div(*temperature, sharpness->select(0, k)) : *temperature);
      if (filtered) filter.call(q, top_k, top_p, min_p);
      probs.select(1, k).copy_(q);
      ids.select(1, k).copy_(sample.call(q, uniforms->select(1, k)));
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t chosen = std::max<int64_t>(id[r * length + k], 0);  // -1: nothing to draw from; any token goes on
      before[r] = vocabulary_ ? vocabulary.const_data_ptr<int64_t>()[chosen] : chosen;
      if (history) copiers[r].append(before[r]);
    }
  }
  return {ids, largest, probs};
}

// ------------------------------------------------------------------------------------------------ top-k, top-p, min-p

double total(const float* p, int64_t size) {
  float lanes[WIDE] = {};
  int64_t i = 0;
  for (; i + WIDE <= size; i += WIDE)
    for (int lane = 0; lane < WIDE; ++lane) lanes[lane] += p[i + lane];
  for (; i < size; ++i) lanes[0] += p[i];
  double sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

// Drops what is below `threshold` and gives its mass to the rest. A lone survivor gets exactly 1, which a product with the
// rounded reciprocal of its mass may miss; a row without mass stays one.
void keep_from(float threshold, float* p, int64_t size) {
  int64_t kept = 0;
  for (int64_t i = 0; i < size; ++i) {
    p[i] = p[i] >= threshold ? p[i] : 0.f;
    kept += p[i] > 0;
  }
  if (!kept) return;
  if (kept == 1) {
    for (int64_t i = 0; i < size; ++i) p[i] = p[i] > 0 ? 1.f : 0.f;
    return;
  }
  const float scale = (float)(1 / total(p, size));
  for (int64_t i = 0; i < size; ++i) p[i] *= scale;
}

// The entries that are at least `least`.
std::vector<float> candidates(const float* p, int64_t size, float least) {
  std::vector<float> found;
  int64_t i = 0;
  for (; i + WIDE <= size; i += WIDE) {
    int any = 0;
    for (int lane = 0; lane < WIDE; ++lane) any |= p[i + lane] >= least;
    for (int lane = 0; any && lane < WIDE; ++lane)
      if (p[i + lane] >= least) found.push_back(p[i + lane]);
  }
  for (; i < size; ++i)
    if (p[i] >= least) found.push_back(p[i]);
  return found;
}

// The k-th largest entry. The k-th largest of the maxima of disjoint runs cannot be larger: what is below it is left out.
float kth_largest(const float* p, int64_t size, int64_t k) {
  if (k >= size) return 0;
  const int64_t run = 64, runs = size / run;
  float least = 0;
  if (k <= runs) {
    std::vector<float> maxima(runs);
    for (int64_t r = 0; r < runs; ++r) {
      float lanes[WIDE] = {};
      for (int64_t i = r * run; i < (r + 1) * run; i += WIDE)
        for (int lane = 0; lane < WIDE; ++lane) lanes[lane] = greater(lanes[lane], p[i + lane]);
      maxima[r] = *std::max_element(lanes, lanes + WIDE);
    }
    std::nth_element(maxima.begin(), maxima.begin() + k - 1, maxima.end(), std::greater<float>());
    least = maxima[k - 1];
  }
  std::vector<float> found = candidates(p, size, least);
  std::nth_element(found.begin(), found.begin() + k - 1, found.end(), std::greater<float>());
  return found[k - 1];
}

// The smallest entry of the smallest set that holds `mass` of a distribution. Entries below (1 - mass) / size together hold
// less than 1 - mass, so none of them is needed; of the rest, the half in which the border lies is halved again.
float nucleus(const float* p, int64_t size, float mass) {
  std::vector<float> found = candidates(p, size, (1 - mass) / size);
  auto first = found.begin(), last = found.end();
  double held = 0;
  while (last - first > 64) {
    const auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, std::greater<float>());
    const double upper = total(&*first, middle - first);
    if (held + upper >= mass)
      last = middle;
    else
      held += upper, first = middle;
  }
  std::sort(first, last, std::greater<float>());
  for (auto at = first; at != last; ++at)
    if ((held += *at) >= mass) return *at;
  return last == found.begin() ? 0 : *(last - 1);
}

// Top-k (0: off), top-p (1: off) and min-p (0: off), one after the other, on distributions [N, V] float32, in place.
void filter_rows_(Tensor& probs, const optional<Tensor>& top_k_, const optional<Tensor>& top_p_, const optional<Tensor>& min_p_) {
  TORCH_CHECK(probs.dim() == 2 && probs.scalar_type() == at::kFloat && probs.is_contiguous(), "probs is contiguous float32 [N, V]");
  const auto values = [&](const optional<Tensor>& t, at::ScalarType dtype) {
    TORCH_CHECK(!t || t->numel() == probs.size(0), "top_k, top_p and min_p are [", probs.size(0), "]");
    return t ? t->to(dtype).contiguous() : Tensor();
  };
  const Tensor top_k = values(top_k_, at::kLong), top_p = values(top_p_, at::kFloat), min_p = values(min_p_, at::kFloat);
  const int64_t rows = probs.size(0), size = probs.size(1);
  float* all = probs.mutable_data_ptr<float>();
  each_row(rows, rows * size, [&](int64_t row) {
    float* p = all + row * size;
    if (top_k.defined() && top_k.const_data_ptr<int64_t>()[row] > 0)
      keep_from(kth_largest(p, size, top_k.const_data_ptr<int64_t>()[row]), p, size);
    if (top_p.defined() && top_p.const_data_ptr<float>()[row] < 1)
      keep_from(nucleus(p, size, top_p.const_data_ptr<float>()[row]), p, size);
    if (min_p.defined() && min_p.const_data_ptr<float>()[row] > 0)
      keep_from(*std::max_element(p, p + size) * min_p.const_data_ptr<float>()[row], p, size);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(surefoot, m) {
  m.def(
      "draft_block(Tensor base, Tensor anchors, Tensor? table, "
      "__torch__.torch.classes.surefoot.Product? product, Tensor? vocabulary, "
      "Tensor? temperature, Tensor? uniforms, Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor? sharpness, Tensor? history, "
      "Tensor? slots, Tensor? lengths, Tensor? shares, Tensor? columns) -> (Tensor, Tensor, Tensor)");
  m.def("filter_rows_(Tensor(a!) probs, Tensor? top_k, Tensor? top_p, Tensor? min_p) -> ()");
}

TORCH_LIBRARY_IMPL(surefoot, CPU, m) {
  m.impl("draft_block", &draft_block);
  m.impl("filter_rows_", &filter_rows_);
}
