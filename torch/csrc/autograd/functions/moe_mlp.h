#pragma once

// The backward of _moe_mlp, which adds to the .grad of expert weights itself where that
// is all that autograd would do with their gradients.
//
// A gradient of all experts is as large as they are. With few rows per expert, most of a
// micro-batch goes into it: new pages are cleared, written, read by AccumulateGrad to add
// them to .grad, and given back. A kernel that adds while a tile is in registers needs
// none of them, and .grad gets the same bits.

#include <ATen/MemoryOverlap.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/native/MoEMLPAccumulate.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace torch::autograd::generated::details {

// What the running node may add to in place of AccumulateGrad, locked as it would be.
//
// Nobody may notice. So not before the first gradient (which is kept, not added), and not
// where the gradient itself is seen or wanted: by hooks of the leaf, of AccumulateGrad or
// of the running node, by torch.autograd.grad, inputs=, create_graph=True, anomaly mode,
// or a mode or subclass that dispatches. Nor where somebody else holds AccumulateGrad, as:
// another use of the weight, whose gradient autograd would add to this one first, and
// DistributedDataParallel, which hooks it.
class InPlaceAccumulation {
 public:
  // operands: all that the backward reads.
  InPlaceAccumulation(MoeMlpBackward0* node, const std::vector<at::Tensor>& operands)
      : node_(node), operands_(operands) {
    on_ = node != nullptr && node->post_hooks().empty() &&
        !GradMode::is_enabled() && !AnomalyMode::is_enabled() &&
        !at::areAnyTensorSubclassLike(operands) &&
        runs_all(get_current_graph_task_exec_info());
  }

  // The .grad of the leaf to which output `index` of the node goes, undefined if the
  // node has to return a gradient. Several locks can not block each other: nobody else
  // has a way to these nodes that adds to more than one.
  at::Tensor grad_of(size_t index, const SavedVariable& saved) {
    if (!on_ || index >= node_->num_outputs()) {
      return {};
    }
    const auto& function = node_->next_edge(index).function;
    auto* leaf = dynamic_cast<AccumulateGrad*>(function.get());
    // The node's own references: its edge, and a saved leaf that went through hooks.
    const size_t own = saved.has_hooks() ? 2 : 1;
    if (leaf == nullptr || function.use_count() != own || is_watched(*leaf)) {
      return {};
    }
    locks_.emplace_back(leaf->*Access::mutex());
    const at::Tensor& grad = leaf->variable.grad();
    if (!can_add(grad, leaf->variable)) {
      locks_.pop_back();
      return {};
    }
    targets_.push_back(grad);
    return grad;
  }

  // The gradients were written.
  void done() const {
    for (const auto& grad : targets_) {
      grad.unsafeGetTensorImpl()->bump_version();
    }
  }

 private:
  struct Access : Node {
    static std::mutex Node::*mutex() {
      return &Access::mutex_;
    }
  };

  // Whether a call of the engine is a backward() of everything: autograd.grad and inputs=
  // list the nodes that run, and hold those of the leaves that they name.
  static bool runs_all(const std::unordered_map<Node*, GraphTask::ExecInfo>* listed) {
    return listed != nullptr && listed->empty();
  }

  static bool is_watched(AccumulateGrad& leaf) {
    return !leaf.pre_hooks().empty() || !leaf.post_hooks().empty() ||
        !leaf.tensor_pre_hooks().empty() || !leaf.retains_grad_hooks().empty() ||
        leaf.tensor_post_acc_grad_hooks() != nullptr || !leaf.variable.requires_grad();
  }

  bool can_add(const at::Tensor& grad, const at::Tensor& weight) const {
    const auto is_apart = [&](const at::Tensor& other) {
      return !other.defined() ||
          at::get_overlap_status(grad, other) == at::MemOverlapStatus::No;
    };
    return grad.defined() && grad.layout() == at::kStrided &&
        grad.device() == weight.device() && grad.dtype() == weight.dtype() &&
        grad.sizes() == weight.sizes() && !at::isTensorSubclassLike(grad) &&
        !grad.requires_grad() && !grad.is_neg() && !grad._is_zerotensor() &&
        !grad.is_inference() &&
        at::has_internal_overlap(grad) == at::MemOverlap::No &&
        std::all_of(operands_.begin(), operands_.end(), is_apart) &&
        std::all_of(targets_.begin(), targets_.end(), is_apart);
  }

  MoeMlpBackward0* node_;
  const std::vector<at::Tensor>& operands_;
  bool on_ = false;
  std::vector<std::unique_lock<std::mutex>> locks_;
  std::vector<at::Tensor> targets_;
};

// _moe_mlp_backward, but that a weight gradient which it has added to .grad is undefined.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
moe_mlp_backward(
    const at::Tensor& grad_out,
    const at::native::moe::MLPInputs& in,
    const at::Tensor& preact,
    std::array<bool, 7> output_mask,
    std::string_view activation,
    bool gate_interleaved,
    std::optional<double> alpha,
    std::optional<double> limit) {
  // Outputs of the node: the operands that gradients may flow to, in the op's order.
  constexpr size_t w_in = 1, w_out = 2, w_up = 6;
  const auto node = get_current_node();
  const std::vector<at::Tensor> operands{
      grad_out, in.input, in.w_in, in.w_out, in.topk_weights, in.b_in, in.b_out, in.w_up, preact};
  if (grad_out.is_cpu()) {
    auto* running = dynamic_cast<MoeMlpBackward0*>(node.get());
    InPlaceAccumulation accumulation(running, operands);
    const auto find = [&](size_t index, SavedVariable MoeMlpBackward0::*saved) {
      return running != nullptr && output_mask[index]
          ? accumulation.grad_of(index, running->*saved)
          : at::Tensor();
    };
    const std::array<at::Tensor, 3> grads{
        find(w_in, &MoeMlpBackward0::w_in_),
        find(w_out, &MoeMlpBackward0::w_out_),
        find(w_up, &MoeMlpBackward0::w_up_)};
    if (grads[0].defined() || grads[1].defined() || grads[2].defined()) {
      RECORD_FUNCTION("aten::_moe_mlp_backward", std::vector<c10::IValue>());
      auto result = at::native::moe_mlp_backward_accumulate(
          grad_out, in, preact, output_mask, activation, gate_interleaved, alpha, limit, grads);
      accumulation.done();
      const auto taken = [&](at::Tensor& grad, const at::Tensor& added_to) {
        if (added_to.defined()) {
          grad = at::Tensor();
        }
      };
      taken(std::get<w_in>(result), grads[0]);
      taken(std::get<w_out>(result), grads[1]);
      taken(std::get<w_up>(result), grads[2]);
      return result;
    }
  }
  return at::_moe_mlp_backward(
      grad_out, in.input, in.w_in, in.w_out, in.offs, in.topk_weights, in.row_slots, in.slot_rows,
      in.b_in, in.b_out, in.w_up, preact, output_mask, activation, gate_interleaved, alpha, limit);
}

} // namespace torch::autograd::generated::details
