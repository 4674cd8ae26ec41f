// _moe_topk: the router of a Mixture-of-Experts layer as one op, so that one kernel
// can run it. F.moe_topk states the rules, and the composite kernel here has them in
// the fewest lines; see MoEUtils.h for the notation.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoETopk.h>
#include <ATen/native/MoEUtils.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_moe_topk_backward_native.h>
#include <ATen/ops/_moe_topk_native.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros_like.h>
#endif

#include <algorithm>
#include <vector>

namespace at::native {

namespace {

void check_logits(const char* op, const Tensor& logits, std::string_view score) {
  TORCH_CHECK_VALUE(
      logits.dim() == 2 && at::isFloatingType(logits.scalar_type()),
      op,
      ": logits must be a floating point tensor of shape (T, E), got ",
      moe::dtype_name(logits.scalar_type()),
      " of shape ",
      moe::shape_string(logits.sym_sizes()));
  TORCH_CHECK_VALUE(
      score == "softmax" || score == "sigmoid",
      op,
      ": score must be 'softmax' or 'sigmoid', got '",
      score,
      "'");
}

} // namespace

void check_moe_topk(
    const Tensor& logits,
    int64_t k,
    const std::optional<Tensor>& bias,
    std::string_view score,
    std::optional<int64_t> num_groups,
    std::optional<int64_t> top_groups) {
  constexpr const char* op = "_moe_topk";
  check_logits(op, logits, score);
  const auto num_experts = logits.sym_size(1);
  if (bias.has_value()) {
    TORCH_CHECK_VALUE(
        bias->dim() == 1 &&
            bias->sym_size(0).sym_eq(num_experts).expect_true(__FILE__, __LINE__) &&
            !bias->is_complex(),
        op,
        ": bias must be a real tensor of shape (E,) = (",
        num_experts,
        ",), got ",
        moe::dtype_name(bias->scalar_type()),
        " of shape ",
        moe::shape_string(bias->sym_sizes()));
    moe::check_placement(op, "bias", *bias, "logits", logits);
  }
  TORCH_CHECK_VALUE(
      num_groups.has_value() == top_groups.has_value(),
      op,
      ": num_groups and top_groups must be given together");
  auto selectable = num_experts;
  if (num_groups.has_value()) {
    TORCH_CHECK_VALUE(
        *num_groups >= 1 &&
            (num_experts % *num_groups).sym_eq(0).expect_true(__FILE__, __LINE__),
        op,
        ": num_groups must divide E = ",
        num_experts,
        ", got ",
        *num_groups);
    TORCH_CHECK_VALUE(
        *top_groups >= 1 && *top_groups <= *num_groups,
        op,
        ": top_groups must be in [1, num_groups] = [1, ",
        *num_groups,
        "], got ",
        *top_groups);
    selectable = num_experts / *num_groups * *top_groups;
  }
  TORCH_CHECK_VALUE(
      k >= 1 && selectable.sym_ge(k).expect_true(__FILE__, __LINE__),
      op,
      ": k must be in [1, ",
      selectable,
      "], the number of selectable experts, got ",
      k);
}

void check_moe_topk_backward(
    const Tensor& grad_weights,
    const Tensor& logits,
    const Tensor& topk_indices,
    std::string_view score) {
  constexpr const char* op = "_moe_topk_backward";
  check_logits(op, logits, score);
  TORCH_CHECK_TYPE(
      topk_indices.scalar_type() == kLong,
      op,
      ": topk_indices must have dtype int64, got ",
      moe::dtype_name(topk_indices.scalar_type()));
  const auto T = logits.sym_size(0);
  TORCH_CHECK_VALUE(
      topk_indices.dim() == 2 &&
          topk_indices.sym_size(0).sym_eq(T).expect_true(__FILE__, __LINE__),
      op,
      ": topk_indices must have shape (T, K) with T = ",
      T,
      ", got ",
      moe::shape_string(topk_indices.sym_sizes()));
  moe::check_shape(
      op, "grad_weights", grad_weights, "(T, K)", topk_indices.sym_sizes());
  moe::check_placement(op, "topk_indices", topk_indices, "logits", logits);
  moe::check_placement(op, "grad_weights", grad_weights, "logits", logits);
}

namespace {

Tensor scores_of(const Tensor& logits, std::string_view score) {
  const auto wide = logits.to(moe_topk_dtype(logits));
  return score == "softmax" ? at::softmax(wide, -1) : at::sigmoid(wide);
}

// Indices of the k largest along the last dimension; ties go to the lower one.
Tensor stable_topk(const Tensor& values, int64_t k) {
  const auto sorted = at::sort(
      values,
      /*stable=*/std::optional<bool>(true),
      /*dim=*/-1,
      /*descending=*/true);
  return std::get<1>(sorted).narrow(-1, 0, k);
}

// How many of its best scores are the score of a group.
int64_t num_best_of_group(bool has_bias, int64_t size) {
  return has_bias ? std::min<int64_t>(2, size) : 1;
}

Tensor select_experts(
    const Tensor& choice,
    int64_t k,
    bool has_bias,
    std::optional<int64_t> num_groups,
    std::optional<int64_t> top_groups) {
  if (!num_groups.has_value()) {
    return stable_topk(choice, k);
  }
  const int64_t size = choice.size(1) / *num_groups;
  const auto grouped = choice.unflatten(-1, {*num_groups, size});
  const int64_t num_best = num_best_of_group(has_bias, size);
  const auto group_scores = std::get<0>(at::topk(grouped, num_best)).sum(-1);
  // Ascending ids, so that ties go to the lower expert after the gather.
  const auto groups =
      std::get<0>(stable_topk(group_scores, *top_groups).sort(-1));
  const auto members = at::arange(size, groups.options());
  const auto candidates = (groups.unsqueeze(-1) * size + members).flatten(-2);
  const auto best = stable_topk(choice.gather(-1, candidates), k);
  return candidates.gather(-1, best);
}

} // namespace

std::tuple<Tensor, Tensor> moe_topk_composite(
    const Tensor& logits,
    int64_t k,
    const std::optional<Tensor>& bias,
    std::string_view score,
    bool normalize,
    std::optional<int64_t> num_groups,
    std::optional<int64_t> top_groups,
    double scale) {
  check_moe_topk(logits, k, bias, score, num_groups, top_groups);
  const auto scores = scores_of(logits, score);
  const auto choice =
      bias.has_value() ? scores + bias->to(scores.scalar_type()) : scores;
  // Not contiguous(): without tokens, a slice of E columns already counts as that.
  const auto indices =
      select_experts(choice, k, bias.has_value(), num_groups, top_groups)
          .clone(at::MemoryFormat::Contiguous);
  auto weights = scores.gather(-1, indices);
  if (normalize) {
    weights = weights / (weights.sum(-1, /*keepdim=*/true) + kMoETopkSumGuard);
  }
  return {indices, weights * scale};
}

std::tuple<Tensor, Tensor> moe_topk_meta(
    const Tensor& logits,
    int64_t k,
    const std::optional<Tensor>& bias,
    std::string_view score,
    bool normalize,
    std::optional<int64_t> num_groups,
    std::optional<int64_t> top_groups,
    double scale) {
  check_moe_topk(logits, k, bias, score, num_groups, top_groups);
  const std::vector<c10::SymInt> sizes = {logits.sym_size(0), k};
  return {
      at::empty_symint(sizes, logits.options().dtype(kLong)),
      at::empty_symint(sizes, logits.options().dtype(moe_topk_dtype(logits)))};
}

// With p the scores, s_j = p[indices_j], S = sum of s + guard and
// w_j = scale * s_j / S:
//   ds_j = scale / S * (g_j - sum_i g_i s_i / S)   (normalize; else scale * g_j)
//   sigmoid: dlogits = scatter(ds * s * (1 - s))
//   softmax: dlogits = scatter(ds * s) - p * sum_j ds_j s_j
Tensor moe_topk_backward_composite(
    const Tensor& grad_weights,
    const Tensor& logits,
    const Tensor& topk_indices,
    std::string_view score,
    bool normalize,
    double scale) {
  check_moe_topk_backward(grad_weights, logits, topk_indices, score);
  const auto scores = scores_of(logits, score);
  const auto chosen = scores.gather(-1, topk_indices);
  auto grad = grad_weights.to(scores.scalar_type()) * scale;
  if (normalize) {
    const auto sum = chosen.sum(-1, /*keepdim=*/true) + kMoETopkSumGuard;
    const auto mean = (grad * chosen).sum(-1, /*keepdim=*/true) / sum;
    grad = (grad - mean) / sum;
  }
  auto weighted = grad * chosen;
  Tensor base;
  if (score == "softmax") {
    base = scores * -weighted.sum(-1, /*keepdim=*/true);
  } else {
    base = at::zeros_like(scores);
    weighted = weighted * (1 - chosen);
  }
  return base.scatter_add(-1, topk_indices, weighted).to(logits.scalar_type());
}

Tensor moe_topk_backward_meta(
    const Tensor& grad_weights,
    const Tensor& logits,
    const Tensor& topk_indices,
    std::string_view score,
    bool normalize,
    double scale) {
  check_moe_topk_backward(grad_weights, logits, topk_indices, score);
  return at::empty_symint(logits.sym_sizes(), logits.options());
}

} // namespace at::native
