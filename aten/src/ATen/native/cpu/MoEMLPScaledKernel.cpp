// Products over experts for _moe_mlp_scaled on CPU: the driver of _moe_mlp (MoEDriver.h)
// without epilogues, as rows have to be quantised between two products.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLPScaledUtils.h>
#include <ATen/native/cpu/MoEWeightGrad.h>

namespace at::native {
namespace {

using namespace moe_cpu;

// Calls fn(scalar_t(0), Micro()) for the two types of products.
template <typename Fn>
void dispatch_product(ScalarType dtype, const Fn& fn) {
  dispatch_micro_gemm(dtype, [&](auto zero, auto micro) {
    using scalar_t = decltype(zero);
    if constexpr (std::is_same_v<scalar_t, float> || std::is_same_v<scalar_t, BFloat16>) {
      fn(zero, micro);
    }
  });
}

void moe_expert_gemm_kernel(
    const moe::MLPInputs& inputs, const Tensor& rows, const Tensor& w, bool transposed,
    const Tensor& out) {
  dispatch_product(rows.scalar_type(), [&](auto zero, auto micro) {
    using scalar_t = decltype(zero);
    using Micro = decltype(micro);
    using acc_t = acc_type<scalar_t>;
    const Routing<acc_t> routing(inputs);
    const WeightSource<scalar_t> weights(w, {}, 1, transposed);
    const int64_t cols = out.size(1);
    auto* data = out.mutable_data_ptr<scalar_t>();
    const RowSource<scalar_t> source{rows.const_data_ptr<scalar_t>(), rows.stride(0)};
    ExpertGemm<scalar_t, Micro, WeightSource<scalar_t>>(routing, source, weights, cols)
        .run(&plain_panel, [&](const Block& block, int64_t n0, int64_t n, const acc_t* c) {
          for (const auto row : c10::irange(block.begin, block.end)) {
            convert_row(c, data + row * cols + n0, n);
            c += kPanelCols;
          }
        });
    zero_unrouted(routing, data, out.size(0), cols);
  });
}

void moe_expert_grad_kernel(
    const moe::MLPInputs& inputs, const Tensor& left, const Tensor& right, const Tensor& grad) {
  dispatch_product(left.scalar_type(), [&](auto zero, auto micro) {
    using scalar_t = decltype(zero);
    const auto rows = [](const Tensor& x) {
      return GradOperand<scalar_t>{{x.const_data_ptr<scalar_t>(), x.stride(0)}};
    };
    WeightGrad<scalar_t, decltype(micro)>(grad, rows(left), rows(right), /*unit=*/1)
        .run(Routing<acc_type<scalar_t>>(inputs));
  });
}

template <typename scalar_t, typename Act>
void activate_rows(
    const Tensor& preact, const Tensor& grad, const moe::ActivationSpec& spec, const Tensor& out) {
  constexpr bool fast = kFastMath<scalar_t>;
  const int64_t cols = preact.size(1), hidden = spec.is_gated ? cols / 2 : cols;
  const HiddenLayout layout{hidden, spec.is_gated, spec.interleaved};
  const ActivationConstants<VecOf<scalar_t>> constants(spec);
  const auto* rows = preact.const_data_ptr<scalar_t>();
  const auto* grads = grad.defined() ? grad.const_data_ptr<float>() : nullptr;
  auto* results = out.mutable_data_ptr<scalar_t>();
  const auto of_units = [&](int64_t row, int64_t f, int64_t n) {
    const auto x = layout.load(rows + row * cols, hidden, f, n);
    if (grads == nullptr) {
      store_lanes(results + row * hidden + f, activate<Act, fast>(x, constants), n);
      return;
    }
    const auto d = load_lanes(grads + row * hidden + f, n);
    const auto at = activate_with_grads<Act, fast>(x, d, constants);
    layout.template store<scalar_t, void>(results + row * cols, f, n, at.grads);
  };
  at::parallel_for(0, preact.size(0), rows_grain(cols), [&](int64_t begin, int64_t end) {
    for (const auto row : c10::irange(begin, end)) {
      for (int64_t f = 0; f < hidden; f += kLanes<scalar_t>) {
        of_units(row, f, std::min(kLanes<scalar_t>, hidden - f));
      }
    }
  });
}

void moe_activation_kernel(
    const Tensor& preact, const Tensor& grad, const moe::ActivationSpec& spec, const Tensor& out) {
  dispatch_activation(spec, [&](auto act) {
    using Act = decltype(act);
    if (preact.scalar_type() == kFloat) {
      activate_rows<float, Act>(preact, grad, spec, out);
    } else {
      activate_rows<BFloat16, Act>(preact, grad, spec, out);
    }
  });
}

}  // namespace

ALSO_REGISTER_AVX512_DISPATCH(moe_activation_stub, &moe_activation_kernel)
ALSO_REGISTER_AVX512_DISPATCH(moe_expert_gemm_stub, &moe_expert_gemm_kernel)
ALSO_REGISTER_AVX512_DISPATCH(moe_expert_grad_stub, &moe_expert_grad_kernel)

}  // namespace at::native
