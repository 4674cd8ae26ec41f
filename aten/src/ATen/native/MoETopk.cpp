// _moe_topk: the router of a Mixture-of-Experts layer as one op, so that an
// accelerator can run it as one kernel. F.moe_topk states the rules; the lines
// here are its lines, but that the CPU does not sort all experts of every token to
// find k of them. See MoEUtils.h for the notation.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/Dispatch.h>
#include <ATen/NumericUtils.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
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
#include <numeric>
#include <vector>

namespace at::native {
namespace {

// Against a sum of 0: all K scores may have underflowed.
constexpr double kSumGuard = 1e-20;

ScalarType score_dtype(const Tensor& logits) {
  return logits.scalar_type() == kDouble ? kDouble : kFloat;
}

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

void check_topk(
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
        bias->dim() == 1 && bias->sym_size(0) == num_experts &&
            !bias->is_complex(),
        op,
        ": bias must be a real tensor of shape (E,) = (",
        num_experts,
        ",), got ",
        moe::dtype_name(bias->scalar_type()),
        " of shape ",
        moe::shape_string(bias->sym_sizes()));
    TORCH_CHECK(
        bias->device() == logits.device(),
        op,
        ": bias must be on the device of logits, ",
        logits.device(),
        ", got ",
        bias->device());
  }
  TORCH_CHECK_VALUE(
      num_groups.has_value() == top_groups.has_value(),
      op,
      ": num_groups and top_groups must be given together");
  auto selectable = num_experts;
  if (num_groups.has_value()) {
    TORCH_CHECK_VALUE(
        *num_groups >= 1 && num_experts % *num_groups == 0,
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
      k >= 1 && selectable >= k,
      op,
      ": k must be in [1, ",
      selectable,
      "], the number of selectable experts, got ",
      k);
}

void check_topk_backward(
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
}

Tensor scores_of(const Tensor& logits, std::string_view score) {
  const auto wide = logits.to(score_dtype(logits));
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

// The best `capacity` of the values offered, best first and NaN before all, as
// at::sort orders them. Of equal values the one offered first is the better.
template <typename scalar_t>
class Best {
 public:
  explicit Best(int64_t capacity) : values_(capacity), ids_(capacity) {}

  void clear() {
    count_ = 0;
  }

  void offer(scalar_t value, int64_t id) {
    if (count_ == ids_.size()) {
      if (!is_better(value, values_[count_ - 1])) {
        return;
      }
      --count_;
    }
    auto place = count_++;
    for (; place > 0 && is_better(value, values_[place - 1]); --place) {
      values_[place] = values_[place - 1];
      ids_[place] = ids_[place - 1];
    }
    values_[place] = value;
    ids_[place] = id;
  }

  std::vector<int64_t>& ids() {
    return ids_;
  }

  scalar_t sum() const {
    return std::accumulate(values_.begin(), values_.end(), scalar_t(0));
  }

 private:
  static bool is_better(scalar_t a, scalar_t b) {
    return a > b || (at::_isnan(a) && !at::_isnan(b));
  }

  std::vector<scalar_t> values_;
  std::vector<int64_t> ids_;
  size_t count_ = 0;
};

// How many of its best scores are the score of a group.
int64_t num_best_of_group(bool has_bias, int64_t size) {
  return has_bias ? std::min<int64_t>(2, size) : 1;
}

// Rows [begin, end) of select_experts().
template <typename scalar_t>
void select_rows(
    const scalar_t* choice,
    int64_t* indices,
    int64_t begin,
    int64_t end,
    int64_t num_experts,
    int64_t k,
    bool has_bias,
    int64_t num_groups,
    int64_t top_groups) {
  const int64_t size = num_experts / num_groups;
  Best<scalar_t> experts(k);
  Best<scalar_t> groups(top_groups);
  std::iota(groups.ids().begin(), groups.ids().end(), 0);
  Best<scalar_t> of_group(num_best_of_group(has_bias, size));
  for (int64_t t = begin; t < end; ++t) {
    const scalar_t* row = choice + t * num_experts;
    if (top_groups < num_groups) {
      groups.clear();
      for (int64_t g = 0; g < num_groups; ++g) {
        of_group.clear();
        for (int64_t e = g * size; e < (g + 1) * size; ++e) {
          of_group.offer(row[e], e);
        }
        groups.offer(of_group.sum(), g);
      }
      // Ascending ids, so that ties go to the lower expert.
      std::sort(groups.ids().begin(), groups.ids().end());
    }
    experts.clear();
    for (const int64_t g : groups.ids()) {
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        experts.offer(row[e], e);
      }
    }
    std::copy_n(experts.ids().begin(), k, indices + t * k);
  }
}

Tensor select_experts_cpu(
    const Tensor& choice,
    int64_t k,
    bool has_bias,
    int64_t num_groups,
    int64_t top_groups) {
  // A block of fewer scores costs less than to hand it to another thread.
  constexpr int64_t kGrainScores = 4096;
  const int64_t T = choice.size(0);
  const int64_t E = choice.size(1);
  const auto scores = choice.contiguous();
  auto indices = at::empty({T, k}, choice.options().dtype(kLong));
  auto* out = indices.mutable_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES(scores.scalar_type(), "_moe_topk", [&] {
    const auto* in = scores.const_data_ptr<scalar_t>();
    at::parallel_for(
        0, T, at::divup(kGrainScores, E), [&](int64_t begin, int64_t end) {
          select_rows(
              in, out, begin, end, E, k, has_bias, num_groups, top_groups);
        });
  });
  return indices;
}

Tensor select_experts(
    const Tensor& choice,
    int64_t k,
    bool has_bias,
    std::optional<int64_t> num_groups,
    std::optional<int64_t> top_groups) {
  if (choice.is_cpu()) {
    return select_experts_cpu(
        choice, k, has_bias, num_groups.value_or(1), top_groups.value_or(1));
  }
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
  check_topk(logits, k, bias, score, num_groups, top_groups);
  const auto scores = scores_of(logits, score);
  const auto choice = bias.has_value() ? scores + *bias : scores;
  // Not contiguous(): without tokens, a slice of E columns already counts as that.
  const auto indices =
      select_experts(choice, k, bias.has_value(), num_groups, top_groups)
          .clone(at::MemoryFormat::Contiguous);
  auto weights = scores.gather(-1, indices);
  if (normalize) {
    weights = weights / (weights.sum(-1, /*keepdim=*/true) + kSumGuard);
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
  check_topk(logits, k, bias, score, num_groups, top_groups);
  const std::vector<c10::SymInt> sizes = {logits.sym_size(0), k};
  return {
      at::empty_symint(sizes, logits.options().dtype(kLong)),
      at::empty_symint(sizes, logits.options().dtype(score_dtype(logits)))};
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
  check_topk_backward(grad_weights, logits, topk_indices, score);
  const auto scores = scores_of(logits, score);
  const auto chosen = scores.gather(-1, topk_indices);
  auto grad = grad_weights.to(scores.scalar_type()) * scale;
  if (normalize) {
    const auto sum = chosen.sum(-1, /*keepdim=*/true) + kSumGuard;
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
  check_topk_backward(grad_weights, logits, topk_indices, score);
  return at::empty_symint(logits.sym_sizes(), logits.options());
}

} // namespace at::native
