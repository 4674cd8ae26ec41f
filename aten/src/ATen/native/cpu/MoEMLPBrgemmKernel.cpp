// Forward of _moe_mlp on brgemm: two blocked GEMMs over all experts at once,
// split over (expert, rows, columns). The gather of tokens is fused into the
// packing of the left operand; bias, activation and router weight into the
// epilogue of a tile that is still in L1; see MoEBrgemm.h for the terms.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLP.h>

#if defined(CPU_CAPABILITY_AVX512)
#include <ATen/native/cpu/MoEActivation.h>
#include <ATen/native/cpu/MoEBrgemmOperands.h>
#endif

namespace at::native {
namespace {

#if defined(CPU_CAPABILITY_AVX512)
using namespace moe_brgemm;
using moe_cpu::Activation;

template <typename scalar_t>
class ForwardPass {
  using compute_t = compute_type<scalar_t>;

 public:
  ForwardPass(
      const moe::MLPInputs& in,
      const moe::ActivationSpec& spec,
      const Tensor& preact)
      : routing_(in),
        layout_{in.w_out.size(2), spec.is_gated, spec.interleaved},
        units_(spec.is_gated ? kPanelCols / 2 : kPanelCols),
        constants_(spec),
        input_(with_dense_rows(in.input)),
        b_in_(contiguous_or_undefined(in.b_in)),
        w_in_(in.w_in),
        act_(at::empty({routing_.last_row, layout_.hidden}, input_.options())),
        preact_(
            preact.defined() ? preact.mutable_data_ptr<scalar_t>() : nullptr) {
    moe_cpu::dispatch_activation(spec.kind, [&](auto kind) {
      activate_ = &ForwardPass::template activate_row<decltype(kind)::value>;
    });
  }

  void run(const moe::MLPInputs& in, const Tensor& output, int64_t rows) {
    if (preact_ != nullptr) {
      zero_unrouted(routing_, preact_, rows, layout_.cols());
    }
    const int64_t d = input_.size(1);
    const RowSource<scalar_t> tokens{
        input_.const_data_ptr<scalar_t>(),
        input_.stride(0),
        routing_.slot_rows.defined() ? &routing_ : nullptr};
    for_each_panel(
        routing_,
        tokens,
        d,
        (layout_.hidden + units_ - 1) / units_,
        w_in_.transposed(0).along_k(),
        [&](const Block& block,
            int64_t panel,
            bool is_last,
            const RowOperand<compute_t>& x,
            compute_t* packed,
            float* c) { hidden_panel(block, panel, is_last, x, packed, c); });

    const WeightStack<scalar_t> w_out(in.w_out);
    const Tensor b_out = contiguous_or_undefined(in.b_out);
    project_tokens(
        routing_,
        RowSource<scalar_t>{act_.const_data_ptr<scalar_t>(), layout_.hidden},
        Projection<scalar_t>{
            w_out,
            /*transposed=*/true,
            data_or_null<scalar_t>(b_out),
            /*weighted=*/true,
            layout_.hidden,
            d},
        output);
  }

 private:
  // Units [f0, f0 + units) of H and A for the rows of a block. With two halves
  // the panel is [gate | up], half of kPanelCols each.
  void hidden_panel(
      const Block& block,
      int64_t panel,
      bool is_last,
      const RowOperand<compute_t>& x,
      compute_t* packed,
      float* c) const {
    const int64_t f0 = panel * units_;
    const int64_t units = std::min(units_, layout_.hidden - f0);
    alignas(64) float bias[kPanelCols] = {};
    load_bias(block.expert, f0, units, bias);
    gemm_panel(
        w_in_.transposed(block.expert),
        columns_of(f0, units, is_last),
        x,
        block.end - block.begin,
        input_.size(1),
        packed,
        c,
        [&](int64_t m0, int64_t m, const float* tile) {
          for (const auto i : c10::irange(m)) {
            (this->*activate_)(
                block.begin + m0 + i, f0, units, tile + i * kPanelCols, bias);
          }
        });
  }

  PanelColumns columns_of(int64_t f0, int64_t units, bool is_last) const {
    const int64_t ahead = is_last ? 0 : units_;
    if (!layout_.gated) {
      return {{{f0, units}, {0, 0}}, ahead};
    }
    if (layout_.interleaved) {
      return {{{2 * f0, 2 * units}, {0, 0}}, 2 * ahead};
    }
    return {
        {{f0, units, 0, units_},
         {layout_.hidden + f0, units, units_, units_}},
        ahead};
  }

  // In the order of the panel's columns.
  void load_bias(int64_t expert, int64_t f0, int64_t units, float* bias) const {
    if (!b_in_.defined()) {
      return;
    }
    const scalar_t* from =
        b_in_.const_data_ptr<scalar_t>() + expert * layout_.cols();
    if (layout_.interleaved) {
      convert_row(from + 2 * f0, bias, 2 * units);
      return;
    }
    convert_row(from + f0, bias, units);
    if (layout_.gated) {
      convert_row(from + layout_.hidden + f0, bias + units_, units);
    }
  }

  // H and A of one row. A is computed from the rounded H, as the backward does.
  template <Activation kind>
  void activate_row(
      int64_t row,
      int64_t f0,
      int64_t units,
      const float* c,
      const float* bias) const {
    scalar_t* act =
        act_.mutable_data_ptr<scalar_t>() + row * layout_.hidden + f0;
    scalar_t* h =
        preact_ == nullptr ? nullptr : preact_ + row * layout_.cols();
    if (routing_.slot(row) < 0) {
      std::fill_n(act, units, scalar_t(0));
      if (h != nullptr) {
        layout_.zero(h, f0, units);
      }
      return;
    }
    const auto column = [&](int64_t j) {
      return round_through<scalar_t>(
          Vec::loadu(c + j) + Vec::loadu(bias + j));
    };
    for (int64_t j = 0; j < units; j += kLanes) {
      const int64_t n = std::min(kLanes, units - j);
      Vec gate, up;
      if (layout_.interleaved) {
        std::tie(gate, up) =
            vec::deinterleave2(column(2 * j), column(2 * j + kLanes));
      } else {
        gate = column(j);
        up = layout_.gated ? column(units_ + j) : gate;
      }
      if (h != nullptr) {
        layout_.store(h, f0 + j, n, gate, up);
      }
      store_float(
          act + j, moe_cpu::activate<kind>(gate, up, constants_), n);
    }
  }

  using activate_fn = void (ForwardPass::*)(
      int64_t,
      int64_t,
      int64_t,
      const float*,
      const float*) const;

  const Routing routing_;
  const HiddenLayout layout_;
  const int64_t units_; // hidden units per panel
  const moe_cpu::ActivationConstants<Vec> constants_;
  const Tensor input_;
  const Tensor b_in_;
  const WeightStack<scalar_t> w_in_;
  const Tensor act_; // (last_row, F)
  scalar_t* preact_; // (R, G*F) or null
  activate_fn activate_ = nullptr;
};
#endif

bool moe_mlp_brgemm_kernel(
    const moe::MLPInputs& inputs,
    const moe::ActivationSpec& activation,
    const Tensor& output,
    const Tensor& preact) {
#if defined(CPU_CAPABILITY_AVX512)
  if (!is_eligible(inputs)) {
    return false;
  }
  dispatch_dtype(inputs.input.scalar_type(), [&](auto zero) {
    ForwardPass<decltype(zero)>(inputs, activation, preact)
        .run(inputs, output, preact.defined() ? preact.size(0) : 0);
  });
  return true;
#else
  return false;
#endif
}

} // namespace

ALSO_REGISTER_AVX512_DISPATCH(moe_mlp_brgemm_stub, &moe_mlp_brgemm_kernel)

} // namespace at::native
