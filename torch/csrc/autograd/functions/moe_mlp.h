#pragma once

// The backward of _moe_mlp, which adds to the .grad of expert weights itself where that
// is all that autograd would do with their gradients.
//
// A gradient of all experts is as large as they are. With few rows per expert, most of a
// micro-batch goes into it: new pages are cleared, written, read by AccumulateGrad to add
// them to .grad, and given back. A kernel that adds while a tile is in registers needs
// none of them, and .grad gets the same bits.

#include <ATen/MemoryOverlap.h>
#include <ATen/native/MoEMLPAccumulate.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

namespace torch::autograd::generated::details {

// What the running node may add to in place of AccumulateGrad, locked as it would be.
//
// Nobody may notice. So not before the first gradient (which is kept, not added), and not
// where the gradient itself, or that it is not in .grad yet, is seen: by hooks of a leaf of
// the node, of its AccumulateGrad or of the node, by torch.autograd.grad, inputs=,
// create_graph=True, anomaly mode, who calls the node by hand, or whatever the dispatcher
// would stop at before the kernel.
// Nor where somebody else holds AccumulateGrad, as: another use of the weight, whose
// gradient autograd would add to this one first, and DistributedDataParallel, which hooks
// it.
class InPlaceAccumulation {
 public:
  // operands: all that the backward reads.
  InPlaceAccumulation(MoeMlpBackward0* node, const std::vector<at::Tensor>& operands)
      : node_(node), operands_(operands) {
    on_ = node != nullptr && node->post_hooks().empty() &&
        std::none_of(node->next_edges().begin(), node->next_edges().end(), is_watched) &&
        !GradMode::is_enabled() && !AnomalyMode::is_enabled() && engine_runs(node) &&
        std::all_of(operands.begin(), operands.end(), [](const at::Tensor& operand) {
          return !operand.defined() || is_plain(operand);
        });
  }

  bool is_on() const {
    return on_;
  }

  // The .grad of the leaf to which output `index` of the node, the gradient of `weight`,
  // goes; undefined if the node has to return that gradient. Several locks can not block
  // each other: nobody else has a way to these nodes that adds to more than one.
  at::Tensor grad_of(size_t index, const SavedVariable& saved, const at::Tensor& weight) {
    const auto& function = node_->next_edge(index).function;
    auto* leaf = dynamic_cast<AccumulateGrad*>(function.get());
    // The node's own references: its edge, and a saved leaf that went through hooks.
    const size_t own = saved.has_hooks() ? 2 : 1;
    if (leaf == nullptr || function.use_count() != own || !leaf->variable.requires_grad()) {
      return {};
    }
    locks_.emplace_back(leaf->*Access::mutex());
    const at::Tensor& grad = leaf->variable.grad();
    // The leaf may have got other data since it was saved: `weight` is what counts. Other
    // strides than the leaf's are warned of by AccumulateGrad.
    if (!can_add(grad, weight) || !utils::obeys_layout_contract(grad, leaf->variable)) {
      return {};
    }
    targets_.push_back(grad);
    return grad;
  }

  void bump_versions() const {
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

  // Whether the engine runs the node in a backward() of everything: autograd.grad and
  // inputs= list the nodes that run, and a hook may call a node of another graph.
  static bool engine_runs(Node* node) {
    const auto* listed = get_current_graph_task_exec_info();
    const auto* nodes = get_current_graph_task_nodes_in_graph();
    return listed != nullptr && listed->empty() && nodes->count(node) != 0;
  }

  // Whether the dispatcher would take the tensor straight to a CPU kernel, past no mode,
  // subclass, transform or lazy value, and it has no tangent.
  static bool is_plain(const at::Tensor& tensor) {
    const auto local = c10::impl::tls_local_dispatch_key_set();
    const auto keys = ((tensor.key_set() | local.included_) - local.excluded_) -
        c10::autograd_dispatch_keyset_with_ADInplaceOrView -
        c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
    return keys.highestPriorityTypeId() == c10::DispatchKey::CPU &&
        !tensor._fw_grad(/*level=*/0).defined();
  }

  static bool is_watched(const Edge& edge) {
    auto* leaf = dynamic_cast<AccumulateGrad*>(edge.function.get());
    return leaf != nullptr &&
        (!leaf->pre_hooks().empty() || !leaf->post_hooks().empty() ||
         !leaf->tensor_pre_hooks().empty() || !leaf->retains_grad_hooks().empty() ||
         leaf->tensor_post_acc_grad_hooks() != nullptr);
  }

  // Storages of their own may be the same memory: from_numpy, from_dlpack.
  static bool is_apart(const at::Tensor& a, const at::Tensor& b) {
    const auto ends_before = [](const c10::Storage& x, const c10::Storage& y) {
      return static_cast<const char*>(x.data()) + x.nbytes() <=
          static_cast<const char*>(y.data());
    };
    return ends_before(a.storage(), b.storage()) || ends_before(b.storage(), a.storage()) ||
        (a.is_alias_of(b) && at::get_overlap_status(a, b) == at::MemOverlapStatus::No);
  }

  bool can_add(const at::Tensor& grad, const at::Tensor& weight) const {
    const auto is_apart_from = [&](const at::Tensor& other) {
      return !other.defined() || is_apart(grad, other);
    };
    return grad.defined() && is_plain(grad) && grad.dtype() == weight.dtype() &&
        grad.sizes() == weight.sizes() && !grad.requires_grad() && !grad.is_inference() &&
        (grad.is_contiguous() || grad.mT().is_contiguous()) &&
        std::all_of(operands_.begin(), operands_.end(), is_apart_from) &&
        std::all_of(targets_.begin(), targets_.end(), is_apart_from);
  }

  MoeMlpBackward0* node_;
  const std::vector<at::Tensor>& operands_;
  bool on_ = false;
  std::vector<std::unique_lock<std::mutex>> locks_;
  std::vector<at::Tensor> targets_;
};

// _moe_mlp_backward, but that weight gradients are undefined where it has added them to .grad.
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
  // All tensors, in that order too.
  const std::vector<at::Tensor> operands{
      grad_out,     in.input,     in.w_in, in.w_out, in.offs, in.topk_weights,
      in.row_slots, in.slot_rows, in.b_in, in.b_out, in.w_up, preact};
  if (grad_out.is_cpu()) {
    auto* running = dynamic_cast<MoeMlpBackward0*>(node.get());
    InPlaceAccumulation accumulation(running, operands);
    std::array<at::Tensor, 3> grads;
    const auto adds = [&](size_t index, SavedVariable MoeMlpBackward0::*saved,
                          const at::Tensor& weight, at::Tensor& grad) {
      if (output_mask[index]) {
        grad = accumulation.grad_of(index, running->*saved, weight);
      }
      return grad.defined() == output_mask[index];
    };
    // All or none: to allocate one may fail, and then none may have been added.
    if (accumulation.is_on() && (output_mask[w_in] || output_mask[w_out] || output_mask[w_up]) &&
        adds(w_in, &MoeMlpBackward0::w_in_, in.w_in, grads[0]) &&
        adds(w_out, &MoeMlpBackward0::w_out_, in.w_out, grads[1]) &&
        adds(w_up, &MoeMlpBackward0::w_up_, in.w_up, grads[2])) {
      accumulation.bump_versions();
      RECORD_FUNCTION(
          "aten::_moe_mlp_backward", std::vector<c10::IValue>(operands.begin(), operands.end()));
      const at::AutoDispatchBelowADInplaceOrView below;
      auto result = at::native::moe_mlp_backward_accumulate(
          grad_out, in, preact, output_mask, activation, gate_interleaved, alpha, limit, grads);
      std::get<w_in>(result) = std::get<w_out>(result) = std::get<w_up>(result) = at::Tensor();
      return result;
    }
  }
  return at::_moe_mlp_backward(
      grad_out, in.input, in.w_in, in.w_out, in.offs, in.topk_weights, in.row_slots, in.slot_rows,
      in.b_in, in.b_out, in.w_up, preact, output_mask, activation, gate_interleaved, alpha, limit);
}

} // namespace torch::autograd::generated::details
