// CPU kernels of _moe_topk and its backward. A token is a row of logits, and each
// row goes through all steps while it is in cache: scores, choice, weights.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoETopk.h>
#include <ATen/native/MoETopkCPU.h>
#include <ATen/native/cpu/MoEPacking.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

namespace at::native {
namespace {

using namespace moe_cpu;

// Fewer scores cost less than handing them to another thread.
constexpr int64_t kGrainScores = 4096;

// The cost of a row in scores: sorting a chosen one costs as much as many others.
int64_t grain(int64_t num_experts, int64_t k) {
  return at::divup(kGrainScores, num_experts + 8 * k);
}

// softmax or sigmoid of a row of n logits.
template <typename scalar_t, typename acc_t>
void scores_of_row(const scalar_t* logits, int64_t n, bool softmax, acc_t* scores) {
  using Vec = vec::Vectorized<acc_t>;
  convert_row(logits, scores, n);
  if (!softmax) {
    vec::map([](Vec x) { return (Vec(1) + x.neg().exp()).reciprocal(); }, scores, scores, n);
    return;
  }
  const acc_t largest =
      vec::reduce_all<acc_t>([](Vec x, Vec y) { return vec::maximum(x, y); }, scores, n);
  vec::map([largest](Vec x) { return (x - Vec(largest)).exp(); }, scores, scores, n);
  const acc_t sum = vec::reduce_all<acc_t>([](Vec x, Vec y) { return x + y; }, scores, n);
  vec::map([sum](Vec x) { return x / Vec(sum); }, scores, scores, n);
}

// A larger rank is better in the order of at::sort(stable, descending): NaN before all,
// 0 and -0 equal.
template <typename scalar_t>
using rank_t = std::conditional_t<std::is_same_v<scalar_t, double>, int64_t, int32_t>;

template <typename scalar_t>
rank_t<scalar_t> rank_of(scalar_t value) {
  using rank = rank_t<scalar_t>;
  constexpr auto kMax = std::numeric_limits<rank>::max();
  value += scalar_t(0); // -0 to 0
  rank bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits ^= (bits >> (8 * sizeof(rank) - 1)) & kMax;
  return value == value ? bits : kMax;
}

template <typename scalar_t>
scalar_t value_of(rank_t<scalar_t> rank) {
  rank ^= (rank >> (8 * sizeof(rank) - 1)) & std::numeric_limits<rank_t<scalar_t>>::max();
  scalar_t value;
  std::memcpy(&value, &rank, sizeof(value));
  return value;
}

// A rank and its place as one key; of equal ranks the lower place is better.
int64_t key_of(int32_t rank, int64_t place) {
  return (static_cast<int64_t>(rank) << 32) | (0xffffffff - place);
}

int64_t place_of(int64_t key) {
  return 0xffffffff - (key & 0xffffffff);
}

std::pair<int64_t, int64_t> key_of(int64_t rank, int64_t place) {
  return {rank, -place};
}

int64_t place_of(const std::pair<int64_t, int64_t>& key) {
  return -key.second;
}

template <typename rank>
using key_t = decltype(key_of(rank(), 0));

// A lower bound of the k-th largest rank that few others exceed: the k-th largest of the
// maxima of 2k or more groups.
template <typename rank>
rank bound_of_best(const rank* ranks, int64_t n, int64_t k, std::vector<rank>& maxima) {
  const int64_t groups = std::max<int64_t>(2 * k, 16);
  if (n < 2 * groups) {
    return std::numeric_limits<rank>::min();
  }
  maxima.assign(ranks, ranks + groups);
  for (int64_t begin = groups; begin < n; begin += groups) {
    const int64_t size = std::min(groups, n - begin);
    for (int64_t i = 0; i < size; ++i) {
      maxima[i] = std::max(maxima[i], ranks[begin + i]);
    }
  }
  const auto kth = maxima.begin() + (k - 1);
  std::nth_element(maxima.begin(), kth, maxima.end(), std::greater<>());
  return *kth;
}

// Chooses the experts of one row after another, in buffers of its own.
template <typename acc_t>
class Chooser {
 public:
  using rank = rank_t<acc_t>;

  Chooser(int64_t num_experts, const MoETopkSpec& spec, const acc_t* bias)
      : groups_(spec.num_groups),
        top_groups_(spec.top_groups),
        size_(num_experts / spec.num_groups),
        bias_(bias),
        ranks_(num_experts),
        keys_(num_experts + 1),
        group_ranks_(spec.num_groups),
        chosen_groups_(spec.num_groups) {}

  // Writes the ids of the k best scores of a row.
  void choose(const acc_t* scores, int64_t k, int64_t* experts) {
    const int64_t num_experts = groups_ * size_;
    for (int64_t e = 0; e < num_experts; ++e) {
      ranks_[e] = rank_of(bias_ == nullptr ? scores[e] : scores[e] + bias_[e]);
    }
    if (top_groups_ == groups_) {
      best(ranks_.data(), num_experts, k, experts);
      return;
    }
    choose_groups();
    for (int64_t g = 0; g < top_groups_; ++g) {
      std::copy_n(ranks_.data() + chosen_groups_[g] * size_, size_, ranks_.data() + g * size_);
    }
    best(ranks_.data(), top_groups_ * size_, k, experts);
    for (int64_t i = 0; i < k; ++i) {
      experts[i] += (chosen_groups_[experts[i] / size_] - experts[i] / size_) * size_;
    }
  }

 private:
  // Places of the k best of n ranks, best first.
  void best(const rank* ranks, int64_t n, int64_t k, int64_t* places) {
    if (k == 1) {
      *places = std::max_element(ranks, ranks + n) - ranks;
      return;
    }
    const rank bound = bound_of_best(ranks, n, k, maxima_);
    // Without a branch on the rank, which no predictor would know. The last key may be
    // written past those that are kept.
    auto last = keys_.begin();
    for (int64_t place = 0; place < n; ++place) {
      *last = key_of(ranks[place], place);
      last += ranks[place] >= bound;
    }
    const auto kth = keys_.begin() + k;
    std::nth_element(keys_.begin(), kth, last, std::greater<>());
    std::sort(keys_.begin(), kth, std::greater<>());
    std::transform(keys_.begin(), kth, places, [](const auto& key) { return place_of(key); });
  }

  // Ascending ids, so that ties between experts go to the lower one.
  void choose_groups() {
    for (int64_t g = 0; g < groups_; ++g) {
      const rank* members = ranks_.data() + g * size_;
      rank first = members[0], second = std::numeric_limits<rank>::min();
      for (int64_t i = 1; i < size_; ++i) {
        second = std::max(second, std::min(first, members[i]));
        first = std::max(first, members[i]);
      }
      group_ranks_[g] = bias_ == nullptr || size_ == 1
          ? first
          : rank_of(value_of<acc_t>(first) + value_of<acc_t>(second));
    }
    auto* ids = chosen_groups_.data();
    best(group_ranks_.data(), groups_, top_groups_, ids);
    std::sort(ids, ids + top_groups_);
  }

  int64_t groups_, top_groups_, size_;
  const acc_t* bias_;
  std::vector<rank> ranks_, maxima_;
  std::vector<key_t<rank>> keys_;
  std::vector<rank> group_ranks_;
  std::vector<int64_t> chosen_groups_;
};

template <typename acc_t>
acc_t sum_of(const acc_t* scores, const int64_t* experts, int64_t k) {
  double sum = 0;
  for (int64_t i = 0; i < k; ++i) {
    sum += scores[experts[i]];
  }
  return static_cast<acc_t>(sum) + static_cast<acc_t>(kMoETopkSumGuard);
}

void moe_topk_kernel(
    const Tensor& logits, const Tensor& bias, const MoETopkSpec& spec, const Tensor& indices,
    const Tensor& weights) {
  const int64_t T = logits.size(0), E = logits.size(1), k = indices.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      kBFloat16, kHalf, logits.scalar_type(), "moe_topk_cpu", [&] {
        using acc_t = at::opmath_type<scalar_t>;
        const auto* in = logits.const_data_ptr<scalar_t>();
        const int64_t stride = logits.stride(0);
        const auto* shift = bias.defined() ? bias.const_data_ptr<acc_t>() : nullptr;
        auto* ids = indices.mutable_data_ptr<int64_t>();
        auto* out = weights.mutable_data_ptr<acc_t>();
        const auto scale = static_cast<acc_t>(spec.scale);
        at::parallel_for(0, T, grain(E, k), [&](int64_t begin, int64_t end) {
          Chooser<acc_t> chooser(E, spec, shift);
          std::vector<acc_t> scores(E);
          for (int64_t t = begin; t < end; ++t) {
            scores_of_row(in + t * stride, E, spec.softmax, scores.data());
            chooser.choose(scores.data(), k, ids + t * k);
            const acc_t sum = spec.normalize ? sum_of(scores.data(), ids + t * k, k) : 1;
            for (int64_t i = t * k; i < (t + 1) * k; ++i) {
              out[i] = scores[ids[i]] / sum * scale;
            }
          }
        });
      });
}

// Turns the `scores` of a row into its gradient, see MoETopk.cpp.
template <typename acc_t>
void grad_of_row(
    const acc_t* grad_weights, const int64_t* experts, int64_t k, int64_t num_experts,
    const MoETopkSpec& spec, acc_t* grads, acc_t* chosen, acc_t* scores) {
  const acc_t sum = spec.normalize ? sum_of(scores, experts, k) : 1;
  double mean = 0;
  for (int64_t i = 0; i < k; ++i) {
    chosen[i] = scores[experts[i]];
    grads[i] = grad_weights[i] * static_cast<acc_t>(spec.scale);
    mean += grads[i] * chosen[i];
  }
  const acc_t shift = spec.normalize ? static_cast<acc_t>(mean) / sum : 0;
  double weighted = 0;
  for (int64_t i = 0; i < k; ++i) {
    grads[i] = (grads[i] - shift) / sum * chosen[i];
    weighted += grads[i];
  }
  if (spec.softmax) {
    using Vec = vec::Vectorized<acc_t>;
    const auto factor = static_cast<acc_t>(-weighted);
    vec::map([factor](Vec x) { return x * Vec(factor); }, scores, scores, num_experts);
  } else {
    std::fill_n(scores, num_experts, acc_t(0));
  }
  for (int64_t i = 0; i < k; ++i) {
    scores[experts[i]] += spec.softmax ? grads[i] : grads[i] * (1 - chosen[i]);
  }
}

void moe_topk_backward_kernel(
    const Tensor& grad_weights, const Tensor& logits, const Tensor& indices,
    const MoETopkSpec& spec, const Tensor& grad_logits) {
  const int64_t T = logits.size(0), E = logits.size(1), k = indices.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      kBFloat16, kHalf, logits.scalar_type(), "moe_topk_backward_cpu", [&] {
        using acc_t = at::opmath_type<scalar_t>;
        const auto* in = logits.const_data_ptr<scalar_t>();
        const int64_t stride = logits.stride(0);
        const auto* grad = grad_weights.const_data_ptr<acc_t>();
        const auto* ids = indices.const_data_ptr<int64_t>();
        auto* out = grad_logits.mutable_data_ptr<scalar_t>();
        at::parallel_for(0, T, grain(E, 0), [&](int64_t begin, int64_t end) {
          std::vector<acc_t> scores(E), grads(k), chosen(k);
          for (int64_t t = begin; t < end; ++t) {
            for (int64_t i = t * k; i < (t + 1) * k; ++i) {
              TORCH_CHECK_INDEX(
                  ids[i] >= 0 && ids[i] < E,
                  "_moe_topk_backward: topk_indices must be in [0, E), E = ", E, ", got ", ids[i]);
            }
            scores_of_row(in + t * stride, E, spec.softmax, scores.data());
            grad_of_row(
                grad + t * k, ids + t * k, k, E, spec, grads.data(), chosen.data(), scores.data());
            vec::convert(scores.data(), out + t * E, E);
          }
        });
      });
}

} // namespace

ALSO_REGISTER_AVX512_DISPATCH(moe_topk_stub, &moe_topk_kernel)
ALSO_REGISTER_AVX512_DISPATCH(moe_topk_backward_stub, &moe_topk_backward_kernel)

} // namespace at::native
