"""gpt-oss of transformers with its experts as the checkpoint has them: blocks of MXFP4.

On a CPU transformers dequantises the experts of a gpt-oss checkpoint to bfloat16 when it loads it:
four times the bytes, which is what decoding waits for. Here they stay in the tensors of the
checkpoint, under its names, and ``_moe_mlp_scaled`` decodes them where it multiplies::

    with torch.device("meta"):
        model = GptOssForCausalLM(config)
    keep_blocks(model)
    model.load_state_dict(checkpoint, assign=True)
    pack(model)  # optional: once, the order of bytes that a CPU reads fastest

Router, attention and everything else are those of transformers.
"""

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.nn.utils._moe_low_bit import pack_panels


_BLOCK = 32  # numbers that share a scale; two of them in a byte
_RECIPE = F.ScalingType.BlockWise1x32.value


class Mxfp4Experts(nn.Module):
    """``GptOssExperts`` whose parameters are those of the checkpoint.

    Attributes:
        gate_up_proj_blocks: (E, 2F, D / 32, 16) uint8, gate and up in turns; the number with the
            even index in the low half of a byte.
        gate_up_proj_scales: (E, 2F, D / 32) uint8, exponents of two plus 127.
        gate_up_proj_bias: (E, 2F)
        down_proj_blocks, down_proj_scales, down_proj_bias: likewise, D rows of F numbers.
        int8_rows: round the rows of both products to int8, by blocks of 32: faster, and an error
            far below the one of the weights.
    """

    def __init__(self, theirs: nn.Module):
        super().__init__()
        self.alpha, self.limit = float(theirs.alpha), float(theirs.limit)
        self.num_experts = E = theirs.num_experts
        D, hidden = theirs.hidden_size, theirs.intermediate_size
        self.int8_rows = self.is_packed = False
        sizes = {"gate_up_proj": (2 * hidden, D), "down_proj": (D, hidden)}
        for name, (rows, depth) in sizes.items():
            if depth % _BLOCK:
                raise ValueError(
                    f"{name} must have rows of whole blocks of {_BLOCK} numbers, got {depth}"
                )
            shape = (E, rows, depth // _BLOCK, _BLOCK // 2)
            for kind, empty in (
                ("blocks", torch.empty(shape, dtype=torch.uint8)),
                ("scales", torch.empty(shape[:3], dtype=torch.uint8)),
                ("bias", torch.empty(shape[:2], dtype=torch.bfloat16)),
            ):
                parameter = nn.Parameter(empty, requires_grad=False)
                self.register_parameter(f"{name}_{kind}", parameter)

    def _weight(self, name: str) -> list[Tensor]:
        blocks, scales = (getattr(self, f"{name}_{k}") for k in ("blocks", "scales"))
        data = blocks.flatten(2).view(torch.float4_e2m1fn_x2)
        return [data, scales.view(torch.float8_e8m0fnu)]

    def pack(self) -> None:
        """Orders the blocks for the CPU kernel, in memory of their own. There is no state dict then."""
        if self.is_packed:
            return
        for name in ("gate_up_proj", "down_proj"):
            packed = zip(("blocks", "scales"), pack_panels(*self._weight(name)))
            for kind, tensor in packed:
                parameter = getattr(self, f"{name}_{kind}")
                # Not in place: a state dict that was assigned belongs to the caller.
                parameter.data = tensor.view(torch.uint8).view(parameter.shape)
        self.is_packed = True

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if self.is_packed:
            raise RuntimeError(
                f"{prefix[:-1]} is packed, in an order that is no checkpoint's; save it before pack()"
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        names = [n for n in self._parameters if not n.endswith("_bias")]
        missing = [n for n in names if prefix + n not in state_dict]
        if self.is_packed and 0 < len(missing) < len(names):
            raise RuntimeError(
                f"{prefix[:-1]} is packed, and takes blocks and scales all at once; missing are {missing}"
            )
        if not missing:
            self.is_packed = False
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, hidden_states, router_indices=None, routing_weights=None):
        """(T, D) tokens, (T, K) expert ids and (T, K) weights -> (T, D)."""
        x, E, rows = hidden_states, self.num_experts, []
        row_slots, slot_rows, offs, _ = torch._moe_permutation(router_indices, E)
        if self.int8_rows:
            rows = list(torch._moe_quantize(x, _RECIPE, dtype=torch.int8))
        return torch._moe_mlp_scaled(
            x, None, None, offs, routing_weights, row_slots, slot_rows,
            self.gate_up_proj_bias.to(x.dtype), self.down_proj_bias.to(x.dtype), None,
            rows, self._weight("gate_up_proj"), self._weight("down_proj"), [],
            recipe_a=[_RECIPE] if self.int8_rows else [], recipe_w=[_RECIPE],
            swizzle_w=[2] if self.is_packed else [], activation="swiglu_oai",
            gate_interleaved=True, alpha=self.alpha, limit=self.limit,
            # Without gradients with int8 rows.
            compute_preact=torch.is_grad_enabled() and not self.int8_rows,
        )[0]  # fmt: skip


def experts_of(model: nn.Module) -> list[Mxfp4Experts]:
    return [m for m in model.modules() if isinstance(m, Mxfp4Experts)]


def keep_blocks(model: nn.Module) -> None:
    """Replaces every ``GptOssExperts`` of a model; its parameters still have to be loaded."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, GptOssExperts):
                with child.down_proj.device:
                    setattr(parent, name, Mxfp4Experts(child))


def pack(model: nn.Module, *, int8_rows: bool = False) -> None:
    """Orders the blocks of all experts for the CPU kernel, see :meth:`Mxfp4Experts.pack`."""
    for experts in experts_of(model):
        experts.pack()
        experts.int8_rows = int8_rows
