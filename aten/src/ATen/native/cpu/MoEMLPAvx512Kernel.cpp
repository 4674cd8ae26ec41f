// Forward of _moe_mlp with AVX512: two blocked GEMMs over all experts at once,
// split over (expert, rows, columns). The gather of tokens is fused into the
// packing of the left operand; bias, activation and router weight into the
// epilogue of a tile that is still in L1; see MoEAvx512.h for the terms.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLP.h>

#if defined(CPU_CAPABILITY_AVX512)
#include <ATen/native/cpu/MoEActivation.h>
#include <ATen/native/cpu/MoEAvx512HiddenLayout.h>
#include <ATen/native/cpu/MoEAvx512Projection.h>
#endif

namespace at::native {
namespace {

#if defined(CPU_CAPABILITY_AVX512)
using namespace moe_avx512;
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
        w_out_(in.w_out),
        packs_act_(
            std::is_same_v<scalar_t, BFloat16> &&
            w_in_.transposed(0).along_k() && w_out_.transposed(0).along_k()),
        first_rows_(PackedRows<scalar_t>::make_first_rows(routing_)),
        act_(at::empty(
            {packs_act_ ? first_rows_.back() : routing_.last_row,
             round_up(layout_.hidden, packs_act_ ? 2 : 1)},
            input_.options())),
        preact_(
            preact.defined() ? preact.mutable_data_ptr<scalar_t>() : nullptr) {
    moe_cpu::dispatch_activation(spec.kind, [&](auto kind) {
      activate_ = &ForwardPass::template activate_row<decltype(kind)::value>;
      if constexpr (std::is_same_v<scalar_t, BFloat16>) {
        activate_pairs_ =
            &ForwardPass::template activate_pairs<decltype(kind)::value>;
      }
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
    const int64_t panels = (layout_.hidden + units_ - 1) / units_;
    for_each_task<scalar_t>(
        routing_,
        tokens,
        d,
        panels,
        w_in_.transposed(0).along_k(),
        [&](const Task<compute_t>& task) {
          PanelTask<scalar_t, compute_t>(
              task,
              [&](int64_t expert) { return w_in_.transposed(expert); },
              panels,
              d)
              .run(
                  [&](int64_t panel) { return columns_of(panel); },
                  [&](int64_t panel, int64_t m0, int64_t m, const auto& tile) {
                    activate_tile(task.block, panel, m0, m, tile);
                  });
        });

    const Tensor b_out = contiguous_or_undefined(in.b_out);
    const Projection<scalar_t> projection{
        w_out_,
        /*transposed=*/true,
        data_or_null<scalar_t>(b_out),
        /*weighted=*/true,
        layout_.hidden,
        d,
        kCombineBytes};
    if (packs_act_) {
      project_tokens(routing_, packed_act(), projection, output);
      return;
    }
    const RowSource<scalar_t> act{
        act_.const_data_ptr<scalar_t>(), layout_.hidden};
    project_tokens(routing_, act, projection, output);
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

  // The same of a tile with one column after the other.
  void activate_tile(
      const Block& block,
      int64_t panel,
      int64_t m0,
      int64_t m,
      const TransposedTile& tile) const {
    if (packs_act_) {
      (this->*activate_pairs_)(block, panel, m0, m, tile);
      return;
    }
    alignas(64) float rows[kTileRows * kPanelCols];
    transpose_tile(tile, m, rows);
    activate_tile(block, panel, m0, m, static_cast<const float*>(rows));
  }

  PackedRows<scalar_t> packed_act() const {
    return {
        act_.mutable_data_ptr<scalar_t>(),
        act_.size(1),
        &routing_,
        first_rows_.data()};
  }

  // Bit i: row + i is not padding.
  __mmask16 live_rows(int64_t row, int64_t rows) const {
    uint32_t mask = 0;
    for (const auto i : c10::irange(std::min<int64_t>(rows, kLanes))) {
      mask |= static_cast<uint32_t>(routing_.slot(row + i) >= 0) << i;
    }
    return static_cast<__mmask16>(mask);
  }

  // H, and A as the operand of the second GEMM, which has pairs of units as the
  // tile does: nothing is transposed but H.
  template <Activation kind>
  MOE_AVX512_BF16_TARGET void activate_pairs(
      const Block& block,
      int64_t panel,
      int64_t m0,
      int64_t m,
      const TransposedTile& tile) const {
    const int64_t f0 = panel * units_;
    const int64_t units = units_of(panel);
    alignas(64) float bias[kPanelCols] = {};
    load_bias(block.expert, f0, units, bias);
    const auto packed = packed_act();
    const int64_t width = tile_width(m, packed.is_thin(block.expert));
    // Pair i of row r is at [i][r].
    auto* act = reinterpret_cast<int32_t*>(
                    packed.tile(block.expert, block.begin + m0)) +
        f0 / 2 * width;
    constexpr int64_t pairs = kPanelCols / 2;
    __m512i h[pairs];
    for (int64_t row0 = 0; row0 < m; row0 += kLanes) {
      const int64_t row = block.begin + m0 + row0;
      const auto live = live_rows(row, m - row0);
      const auto columns = std::min(kLanes, width - row0);
      for (const auto i : c10::irange(pairs)) {
        const auto column = [&](int64_t j) {
          return Vec::loadu(tile.column(j) + row0) + Vec(bias[j]);
        };
        h[i] = _mm512_maskz_mov_epi32(
            live, pack_pair(column(2 * i), column(2 * i + 1)));
      }
      store_preact(h, panel, row, m - row0);
      for (int64_t i = 0; 2 * i < units; ++i) {
        const auto [low, high] = activate_pair<kind>(h, i);
        __m512i a = _mm512_maskz_mov_epi32(live, pack_pair(low, high));
        if (2 * i + 1 == units) {
          a = _mm512_and_si512(a, _mm512_set1_epi32(0xffff));
        }
        _mm512_mask_storeu_epi32(
            act + i * width + row0,
            static_cast<__mmask16>((1u << columns) - 1),
            a);
      }
    }
  }

  // A of units 2 i and 2 i + 1 of a panel whose H is given.
  template <Activation kind>
  std::pair<Vec, Vec> activate_pair(const __m512i* h, int64_t i) const {
    if (layout_.interleaved) {
      const auto [gate0, up0] = unpack_pair(h[2 * i]);
      const auto [gate1, up1] = unpack_pair(h[2 * i + 1]);
      return {
          moe_cpu::activate<kind, kFastMath<scalar_t>>(gate0, up0, constants_),
          moe_cpu::activate<kind, kFastMath<scalar_t>>(gate1, up1, constants_)};
    }
    const auto [gate0, gate1] = unpack_pair(h[i]);
    const auto [up0, up1] =
        unpack_pair(layout_.gated ? h[units_ / 2 + i] : h[i]);
    return {
        moe_cpu::activate<kind, kFastMath<scalar_t>>(gate0, up0, constants_),
        moe_cpu::activate<kind, kFastMath<scalar_t>>(gate1, up1, constants_)};
  }

  // H of a panel's columns for the rows from `row` on, at most kLanes.
  void store_preact(const __m512i* h, int64_t panel, int64_t row, int64_t rows)
      const {
    if (preact_ == nullptr) {
      return;
    }
    const int64_t ld = layout_.cols();
    for (const auto& span : columns_of(panel).spans) {
      for (int64_t j = 0; j < span.count; j += 2 * kLanes) {
        store_pairs(
            h + (span.at + j) / 2,
            rows,
            span.count - j,
            preact_ + row * ld + span.first + j,
            ld);
      }
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
      return moe_cpu::activate<kind, kFastMath<scalar_t>>(gate, up, constants_);
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
  const WeightStack<scalar_t> w_in_, w_out_;
  const bool packs_act_;
  const std::vector<int64_t> first_rows_; // of act_, if packed
  const Tensor act_; // (last_row, F) or packed rows
  scalar_t* preact_; // (R, G*F) or null
  activate_fn activate_ = nullptr;
  void (ForwardPass::*activate_pairs_)(
      const Block&,
      int64_t,
      int64_t,
      int64_t,
      const TransposedTile&) const = nullptr;
};
#endif

bool moe_mlp_avx512_kernel(
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

ALSO_REGISTER_AVX512_DISPATCH(moe_mlp_avx512_stub, &moe_mlp_avx512_kernel)

} // namespace at::native
