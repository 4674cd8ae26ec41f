// Products over experts for _moe_mlp_scaled on CPU: the driver of _moe_mlp (MoEDriver.h)
// without its epilogues, as the rows have to be quantised between two products.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLPScaled.h>
#include <ATen/native/cpu/MoEWeightGrad.h>

namespace at::native {
namespace {

using namespace moe_cpu;

// fn(scalar_t(0), Micro()) for the two types of products.
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
    const int64_t cols = out.size(1), panels = (cols + kPanelCols - 1) / kPanelCols;
    auto* data = out.mutable_data_ptr<scalar_t>();
    const auto cols_of = [&](int64_t panel) {
      return std::min(kPanelCols, cols - panel * kPanelCols);
    };
    const RowSource<scalar_t> source{rows.const_data_ptr<scalar_t>(), rows.stride(0)};
    ExpertGemm<scalar_t, Micro, WeightSource<scalar_t>>(routing, source, weights, panels)
        .run(
            [&](int64_t panel) { return plain_panel(panel * kPanelCols, cols_of(panel)); },
            [&](const Block& block, int64_t panel, const acc_t* c) {
              for (const auto row : c10::irange(block.begin, block.end)) {
                convert_row(c, data + row * cols + panel * kPanelCols, cols_of(panel));
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
    WeightGrad<scalar_t, decltype(micro)>(grad, rows(left), rows(right))
        .run(Routing<acc_type<scalar_t>>(inputs));
  });
}

}  // namespace

ALSO_REGISTER_AVX512_DISPATCH(moe_expert_gemm_stub, &moe_expert_gemm_kernel)
ALSO_REGISTER_AVX512_DISPATCH(moe_expert_grad_stub, &moe_expert_grad_kernel)

}  // namespace at::native
