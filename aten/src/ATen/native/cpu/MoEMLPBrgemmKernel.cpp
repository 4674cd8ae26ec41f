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
    for_each_task(
        routing_,
        tokens,
        d,
        (layout_.hidden + units_ - 1) / units_,
        w_in_.transposed(0).along_k(),
        [&](const Block& block,
            int64_t first,
            int64_t last,
            const RowOperand<compute_t>& x,
            compute_t* packed,
            float* c) {
          const auto w = w_in_.transposed(block.expert);
          PanelTask<scalar_t, compute_t>{
              w, first, last, x, block.end - block.begin, d, packed, c}
              .run(
                  [&](int64_t panel) { return columns_of(panel); },
                  [&](int64_t panel, int64_t m0, int64_t m, const float* tile) {
                    activate_tile(block, panel, m0, m, tile);
                  },
                  NoPrologue{});
        });

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
  int64_t units_of(int64_t panel) const {
    return std::min(units_, layout_.hidden - panel * units_);
  }

  // H and A of a panel's units for m rows of a block.
  void activate_tile(
      const Block& block,
      int64_t panel,
      int64_t m0,
      int64_t m,
      const float* tile) const {
    const int64_t f0 = panel * units_;
    const int64_t units = units_of(panel);
    alignas(64) float bias[kPanelCols] = {};
    load_bias(block.expert, f0, units, bias);
    for (const auto i : c10::irange(m)) {
      (this->*activate_)(
          block.begin + m0 + i, f0, units, tile + i * kPanelCols, bias);
    }
  }

  // With two halves the panel is [gate | up], half of kPanelCols each.
  PanelColumns columns_of(int64_t panel) const {
    const int64_t f0 = panel * units_;
    const int64_t units = units_of(panel);
    if (!layout_.gated) {
      return {{{f0, units}, PanelSpan{}}};
    }
    if (layout_.interleaved) {
      return {{{2 * f0, 2 * units}, PanelSpan{}}};
    }
    return {
        {{f0, units, 0, units_},
         {layout_.hidden + f0, units, units_, units_}}};
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
      return Vec::loadu(c + j) + Vec::loadu(bias + j);
    };
    const auto activated = [&](const Vec& gate, const Vec& up) {
      return moe_cpu::activate<kind>(gate, up, constants_);
    };
    int64_t j = 0;
    for (; j + 2 * kLanes <= units; j += 2 * kLanes) {
      Vec gates[2], ups[2];
      if (layout_.interleaved) {
        for (const auto i : c10::irange(2)) {
          const int64_t at = 2 * j + 2 * i * kLanes;
          const auto [low, high] = store_rounded(
              h == nullptr ? h : h + 2 * f0 + at,
              column(at),
              column(at + kLanes));
          std::tie(gates[i], ups[i]) = vec::deinterleave2(low, high);
        }
      } else {
        const auto half = [&](int64_t at, int64_t to, Vec* x) {
          std::tie(x[0], x[1]) = store_rounded(
              h == nullptr ? h : h + to + f0 + j,
              column(at + j),
              column(at + j + kLanes));
        };
        half(0, 0, gates);
        if (layout_.gated) {
          half(units_, layout_.hidden, ups);
        } else {
          std::copy_n(gates, 2, ups);
        }
      }
      store_rounded(
          act + j, activated(gates[0], ups[0]), activated(gates[1], ups[1]));
    }
    for (; j < units; j += kLanes) {
      const int64_t n = std::min(kLanes, units - j);
      Vec gate, up;
      if (layout_.interleaved) {
        std::tie(gate, up) = vec::deinterleave2(
            round_through<scalar_t>(column(2 * j)),
            round_through<scalar_t>(column(2 * j + kLanes)));
      } else {
        gate = round_through<scalar_t>(column(j));
        up = layout_.gated ? round_through<scalar_t>(column(units_ + j)) : gate;
      }
      if (h != nullptr) {
        layout_.store(h, f0 + j, n, gate, up);
      }
      store_float(act + j, activated(gate, up), n);
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
