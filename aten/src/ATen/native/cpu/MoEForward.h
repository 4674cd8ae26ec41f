#pragma once

// Forward of _moe_mlp: two products over all experts (MoEDriver.h). The left operand
// gathers the tokens. Bias, activation and router weight are the epilogue
// of a tile that is still in cache. The caller decides how the weights are stored.

#include <ATen/native/cpu/MoEProjection.h>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

// `in` may lack the weights: only sizes of `hidden` units and the sources of `run` are used.
template <typename scalar_t, typename Micro>
class ForwardPass {
  using acc_t = acc_type<scalar_t>;
  using Vec = VecOf<scalar_t>;

 public:
  ForwardPass(
      const moe::MLPInputs& in, const moe::ActivationSpec& spec, int64_t hidden,
      const Tensor& preact)
      : in_(in),
        routing_(in),
        layout_{hidden, spec.is_gated, spec.interleaved},
        units_(spec.is_gated ? kPanelCols / 2 : kPanelCols),
        constants_(spec),
        input_(with_dense_rows(in.input)),
        b_in_(contiguous_or_undefined(in.b_in)),
        act_ld_(spread(layout_.hidden)),
        act_(in.input.new_empty({routing_.last_row, act_ld_})),
        act_data_(act_.template mutable_data_ptr<scalar_t>()),
        preact_(preact.defined() ? preact.mutable_data_ptr<scalar_t>() : nullptr) {
    if (preact.defined()) {
      zero_unrouted(routing_, preact_, preact.size(0), layout_.cols());
    }
    dispatch_activation(spec, [&](auto act) {
      activate_row_ = &ForwardPass::template activate_row<decltype(act)>;
    });
  }

  const HiddenLayout& layout() const {
    return layout_;
  }

  // Writes `output` (T, D), and H if it is kept. w_in and w_out are sources of panels
  // (MoEDriver.h).
  template <typename Weights>
  void run(const Weights& w_in, const Weights& w_out, const Tensor& output) {
    ExpertGemm<scalar_t, Micro, Weights>(
        routing_, rows_of_tokens<scalar_t>(input_, routing_), w_in, layout_.hidden, units_)
        .run(
            [&](int64_t f0, int64_t units) { return columns_of(f0, units); },
            [&](const Block& block, int64_t f0, int64_t units, const acc_t* c) {
              activate_tile(block, f0, units, c);
            });
    const Tensor b_out = contiguous_or_undefined(in_.b_out);
    project_tokens<scalar_t, Micro>(
        routing_, RowSource<scalar_t>{act_data_, act_ld_}, w_out,
        data_or_null<scalar_t>(b_out), /*weighted=*/true, kCombineBytes, output);
  }

 private:
  // Elements from one row to the next. Rows a multiple of 4 KiB apart would share one set of L1, and
  // evict each other.
  static int64_t spread(int64_t size) {
    constexpr auto line = static_cast<int64_t>(64 / sizeof(scalar_t));
    return size > 0 && size % (64 * line) == 0 ? size + line : size;
  }

  // With two halves the panel is [gate | up], half of kPanelCols each.
  PanelColumns columns_of(int64_t f0, int64_t units) const {
    if (layout_.halves() == 1) {
      return layout_.gated ? plain_panel(2 * f0, 2 * units) : plain_panel(f0, units);
    }
    return {{{0, f0, units, 0, units_}, {1, f0, units, units_, units_}}};
  }

  // H and A of a panel's units for the rows of a block.
  void activate_tile(const Block& block, int64_t f0, int64_t units, const acc_t* c) const {
    alignas(64) acc_t bias[kPanelCols] = {};
    if (b_in_.defined()) {
      const auto* from = b_in_.const_data_ptr<scalar_t>() + block.expert * layout_.cols();
      for (const auto& span : columns_of(f0, units).spans) {
        convert_row(from + span.part * layout_.hidden + span.first, bias + span.at, span.count);
      }
    }
    for (const auto row : c10::irange(block.begin, block.end)) {
      (this->*activate_row_)(row, f0, units, c, bias);
      c += kPanelCols;
    }
  }

  // H and A of one row. A is computed from the rounded H, as the backward does.
  template <typename Act>
  void
  activate_row(int64_t row, int64_t f0, int64_t units, const acc_t* c, const acc_t* bias) const {
    scalar_t* act = act_data_ + row * act_ld_ + f0;
    scalar_t* h = preact_ == nullptr ? nullptr : preact_ + row * layout_.cols();
    if (routing_.slot(row) < 0) {
      std::fill_n(act, units, scalar_t(0));
      layout_.for_each_half(h, f0, units, [](scalar_t* x, int64_t n) { std::fill_n(x, n, 0); });
      return;
    }
    // The tile is a row of H: gates, then ups from column units_.
    for (int64_t j = 0; j < units; j += kLanes<scalar_t>) {
      const int64_t n = std::min(kLanes<scalar_t>, units - j);
      const auto x = layout_.load(c, units_, j, n);
      const auto b = layout_.load(bias, units_, j, n);
      const auto rounded = layout_.template store<scalar_t, Micro>(
          h, f0 + j, n, {x.gate + b.gate, x.up + b.up});
      store_lanes<scalar_t, Micro>(
          act + j, activate<Act, kFastMath<scalar_t>>(rounded, constants_), n);
    }
  }

  const moe::MLPInputs& in_;
  const Routing<acc_t> routing_;
  const HiddenLayout layout_;
  const int64_t units_;  // hidden units per panel
  const ActivationConstants<Vec> constants_;
  const Tensor input_, b_in_;
  const int64_t act_ld_;
  const Tensor act_;  // (last_row, act_ld_), of which F are used
  scalar_t* act_data_;
  scalar_t* preact_;  // (R, G*F) or null
  void (ForwardPass::*activate_row_)(int64_t, int64_t, int64_t, const acc_t*, const acc_t*) const =
      nullptr;
};

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native
