// What the host works out before and between the passes, in one call each: prompt lookup (`PromptLookupDrafter`), the stopping
// rule of the planner (`stopping_rule` of speculation/stopping.py, decision for decision) and the rows of the target pass
// (`pack` of engine/packing.py, bit for bit).
//
// Nothing of these is in the caches when a step on a CPU comes to them. What costs there is the number of operators, and
// in torch and numpy they take some sixty, sixty and thirty.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Optional.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>
#include <vector>

using at::Tensor;
using c10::optional;

namespace {

constexpr double GRID = 1 << 24;  // survivals are rounded to multiples of 1 / GRID, whose sums are exact

struct Position {
  float key;  // survival, or 2 where it is mandatory
  int64_t request;
  double gain;
};

const double* doubles(const Tensor& t, const char* what, std::vector<int64_t> shape) {
  TORCH_CHECK(t.sizes() == shape && t.scalar_type() == at::kDouble && t.is_contiguous(), what, " is contiguous float64 ", shape);
  return t.const_data_ptr<double>();
}

// survival [D, gamma] float32, limits [D] int64, costs [limits.sum() + 1], edges [gamma, bins - 1] and ratio
// [gamma, bins, gamma] of the continuation model -> widths [D] int64, their sum, expected tokens.
std::tuple<Tensor, int64_t, double> stopping_rule(
    const Tensor& survival_, const Tensor& limits_, const Tensor& costs_, const Tensor& edges_, const Tensor& ratio_,
    int64_t requests, int64_t min_width, optional<double> price, int64_t few_requests) {
  TORCH_CHECK(survival_.dim() == 2 && survival_.scalar_type() == at::kFloat, "survival is float32 [D, gamma]");
  const int64_t drafted = survival_.size(0), gamma = survival_.size(1), bins = ratio_.size(1);
  TORCH_CHECK(limits_.numel() == drafted && limits_.scalar_type() == at::kLong, "limits is int64 [D]");
  const Tensor survival_c = survival_.contiguous(), limits_c = limits_.contiguous();
  const float* survival = survival_c.const_data_ptr<float>();
  const int64_t* limits = limits_c.const_data_ptr<int64_t>();
  const double* edges = doubles(edges_, "edges", {gamma, bins - 1});
  const double* ratio = doubles(ratio_, "ratio", {gamma, bins, gamma});

  // In the order in which slots are given out: mandatory ones, then by survival; ties by position, then by request.
  std::vector<Position> order;
  for (int64_t k = 0; k < gamma; ++k)
    for (int64_t r = 0; r < drafted; ++r)
      if (k < limits[r]) {
        const float s = survival[r * gamma + k];
        order.push_back({k < min_width ? 2.f : s, r, std::rint(s * GRID) / GRID});
      }
  std::stable_sort(order.begin(), order.end(), [](const Position& a, const Position& b) { return a.key > b.key; });
  const int64_t full = order.size();
  const double* costs = doubles(costs_, "costs", {full + 1});
  std::vector<double> expected(full + 1, (double)requests);
  double sum = 0;
  for (int64_t k = 0; k < full; ++k) expected[k + 1] = requests + (sum += order[k].gain);

  const Tensor widths_ = at::zeros({drafted}, at::kLong);
  int64_t* widths = widths_.mutable_data_ptr<int64_t>();
  int64_t chosen = 0;
  const auto choose_until = [&](int64_t end) {
    while (chosen < end) ++widths[order[chosen++].request];
  };
  int64_t mandatory = 0;
  for (int64_t r = 0; r < drafted; ++r) mandatory += std::min(limits[r], min_width);
  choose_until(mandatory);

  const bool few = drafted <= few_requests;
  std::vector<double> gains;
  while (chosen < full) {
    if (costs[chosen + 1] <= costs[chosen]) {  // the rest of a shelf is free
      choose_until(chosen + 1);
      continue;
    }
    const double stop = expected[chosen], now = costs[chosen];
    if (few) {  // a next position that pays for itself needs no model
      const double with_next = expected[chosen + 1], then = costs[chosen + 1];
      if (price ? with_next - stop > *price * (then - now) : with_next * now > stop * then) {
        choose_until(chosen + 1);
        continue;
      }
    }
    // Expected gain of every further position: the next one of a request by its own survival, later ones by the model.
    gains.clear();
    for (int64_t r = 0; r < drafted; ++r) {
      const int64_t next = widths[r];
      if (next >= limits[r]) continue;
      const double s = survival[r * gamma + next];
      const double* edge = edges + next * (bins - 1);
      const int64_t bin = std::upper_bound(edge, edge + bins - 1, s) - edge;
      for (int64_t k = next; k < limits[r]; ++k) gains.push_back(std::min(s * ratio[(next * bins + bin) * gamma + k], 1.0));
    }
    std::sort(gains.begin(), gains.end(), std::greater<double>());
    int64_t best = 0;
    double most = 0, ahead = 0;
    for (int64_t n = 0; n < (int64_t)gains.size(); ++n) {
      ahead += gains[n];
      const double go = costs[chosen + 1 + n];
      const double worth = price ? (stop + ahead - stop) - *price * (go - now) : (stop + ahead) / go - stop / now;
      if (n == 0 || worth > most) most = worth, best = n;
    }
    if (most <= 0) break;
    choose_until(chosen + (few ? 1 : 1 + best / 2));
  }
  return {widths_, chosen, expected[chosen]};
}

// history [S, L] int64, slots and lengths [R] int64 -> drafts [R, gamma] int64 and match lengths [R] int64, 0 for none: what
// followed the longest earlier occurrence of the suffix that ends at history[slot, length], the most recent among equals,
// repeated from there on; without one of at least `shortest` tokens the suffix's last token.
std::tuple<Tensor, Tensor> look_up(const Tensor& history, const Tensor& slots_, const Tensor& lengths_, int64_t gamma,
                                   int64_t longest, int64_t shortest) {
  const int64_t count = slots_.numel(), width = history.size(1);
  for (const Tensor* t : {&slots_, &lengths_, &history})
    TORCH_CHECK(t->scalar_type() == at::kLong && t->is_contiguous(), "slots, lengths and history are contiguous int64");
  TORCH_CHECK(lengths_.numel() == count, count, " slots and ", lengths_.numel(), " lengths");
  const int64_t *slots = slots_.const_data_ptr<int64_t>(), *lengths = lengths_.const_data_ptr<int64_t>();
  const Tensor drafts = at::empty({count, gamma}, history.options()), matched = at::empty({count}, history.options());
  for (int64_t r = 0; r < count; ++r) {
    TORCH_CHECK(slots[r] >= 0 && slots[r] < history.size(0) && lengths[r] >= 0 && lengths[r] < width, "a request outside the history");
    const int64_t *text = history.const_data_ptr<int64_t>() + slots[r] * width, *anchor = text + lengths[r];
    int64_t best = 0, period = 1;
    for (const int64_t* end = anchor - 1; end >= text && best < longest; --end) {
      const int64_t most = std::min(longest, (int64_t)(end - text) + 1);
      int64_t length = 0;
      while (length < most && end[-length] == anchor[-length]) ++length;
      if (length > best) best = length, period = anchor - end;
    }
    const bool found = best >= shortest;
    matched.mutable_data_ptr<int64_t>()[r] = found ? best : 0;
    int64_t* draft = drafts.mutable_data_ptr<int64_t>() + r * gamma;
    for (int64_t k = 0; k < gamma; ++k) draft[k] = found ? anchor[1 - period + k % period] : *anchor;
  }
  return {drafts, matched};
}

// The flat axis of a step. slots, lengths and context [R] int64 of its requests, widths [E] int64 of the first E, which
// emit; history [S, L] int64; block tables [S, blocks] int32, with the positions that share an entry -> per row (token, position, state slot, visible positions,
// cache slot by table) [4 + tables, rows] int64, padded with zeros; logit rows [sum(widths + 1)]; [E] which of these is the
// anchor's.
std::tuple<Tensor, Tensor, Tensor> pack_rows(
    const Tensor& slots_, const Tensor& lengths_, const Tensor& context_, const Tensor& widths_, const Tensor& history,
    at::TensorList tables, at::IntArrayRef strides, int64_t block_size, int64_t padded) {
  const int64_t count = slots_.numel(), emitting = widths_.numel(), groups = tables.size();
  const auto longs = [](const Tensor& t, int64_t size, const char* what) {
    TORCH_CHECK(t.scalar_type() == at::kLong && t.numel() == size && t.is_contiguous(), what, " is contiguous int64 [", size, "]");
    return t.const_data_ptr<int64_t>();
  };
  const int64_t *slots = longs(slots_, count, "slots"), *lengths = longs(lengths_, count, "lengths");
  const int64_t *context = longs(context_, count, "context"), *widths = longs(widths_, emitting, "widths");
  TORCH_CHECK(emitting <= count && history.scalar_type() == at::kLong && history.is_contiguous(), "history is contiguous int64");
  for (const Tensor& table : tables)
    TORCH_CHECK(table.scalar_type() == at::kInt && table.is_contiguous(), "block tables are contiguous int32");
  TORCH_CHECK((int64_t)strides.size() == groups, groups, " block tables and ", strides.size(), " strides");

  int64_t total = 0, num_logits = emitting;
  for (int64_t r = 0; r < count; ++r) total += context[r] + (r < emitting ? widths[r] + 1 : 0);
  for (int64_t r = 0; r < emitting; ++r) num_logits += widths[r];
  TORCH_CHECK(total <= padded, total, " rows do not fit into ", padded);
  const Tensor rows_ = at::zeros({4 + groups, padded}, at::kLong);
  const Tensor logit_rows_ = at::zeros({num_logits}, at::kLong), anchor_row_ = at::zeros({emitting}, at::kLong);
  int64_t* rows = rows_.mutable_data_ptr<int64_t>();
  int64_t *logit_rows = logit_rows_.mutable_data_ptr<int64_t>(), *anchor_row = anchor_row_.mutable_data_ptr<int64_t>();
  const int64_t* tokens = history.const_data_ptr<int64_t>();

  int64_t row = 0, logit = 0;
  const auto write = [&](int64_t slot, int64_t position) {
    TORCH_CHECK(slot >= 0 && slot < history.size(0) && position >= 0 && position < history.size(1), "a row outside the history");
    int64_t* cell = rows + row++;
    *cell = tokens[slot * history.size(1) + position];
    *(cell += padded) = position;
    *(cell += padded) = slot;
    *(cell += padded) = position + 1;
    for (int64_t g = 0; g < groups; ++g) {
      const Tensor& table = tables[g];
      const int64_t entry = position / strides[g], block = entry / block_size, place = entry % block_size;
      TORCH_CHECK(slot < table.size(0) && block < table.size(1), "a row outside a block table");
      *(cell += padded) = table.const_data_ptr<int32_t>()[slot * table.size(1) + block] * block_size + place;
    }
  };
  for (int64_t r = 0; r < count; ++r) {
    const int64_t window = r < emitting ? widths[r] + 1 : 0;
    if (r < emitting) anchor_row[r] = logit;
    for (int64_t k = 0; k < window; ++k) logit_rows[logit++] = row + context[r] + k;
    for (int64_t k = 0; k < context[r] + window; ++k) write(slots[r], lengths[r] + k);
  }
  for (; row < padded;) rows[row++] = tokens[0];  // padding stands at slot 0, position 0 and sees nothing
  return {rows_, logit_rows_, anchor_row_};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(surefoot, m) {
  m.def(
      "stopping_rule(Tensor survival, Tensor limits, Tensor costs, Tensor edges, Tensor ratio, int requests, int min_width, "
      "float? price, int few) -> (Tensor, int, float)");
  m.def(
      "look_up(Tensor history, Tensor slots, Tensor lengths, int gamma, int longest, int shortest) -> (Tensor, Tensor)");
  m.def(
      "pack_rows(Tensor slots, Tensor lengths, Tensor context, Tensor widths, Tensor history, Tensor[] tables, "
      "int[] strides, int block_size, int rows) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(surefoot, CPU, m) {
  m.impl("stopping_rule", &stopping_rule);
  m.impl("look_up", &look_up);
  m.impl("pack_rows", &pack_rows);
}
