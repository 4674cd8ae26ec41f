"""Why ``aten::_moe_mlp_scaled``, its backward and ``aten::_moe_quantize`` stay calls.

torch/_native/ops/moe has no kernel for operands of 8 bits and fewer, so there is nothing to trace. Their
composites turn every weight into 16 bits on each call: as Inductor IR that would move the same bytes,
whatever fuses. TORCH_LOGS="+inductor" says so once for every call that is compiled.
"""

from typing import Any

import torch
from torch._inductor.kernel.moe import _general_reason, _stays
from torch._inductor.lowering import fallback_handler, register_lowering


aten = torch.ops.aten


def _keep(op: torch._ops.OpOverload) -> None:
    """Makes ``op`` a call that says why it is one."""
    name = op._schema.name.removeprefix("aten::")
    fallback = fallback_handler(op, add_to_fallback_set=False)

    @register_lowering(op, type_promotion_kind=None)
    def lowering(first: Any, *rest: Any, **options: Any) -> Any:
        _stays(
            name,
            _general_reason(first)
            or "there is no Triton kernel for operands of 8 bits and fewer",
        )
        return fallback(first, *rest, **options)


for _op in (
    aten._moe_quantize.default,
    aten._moe_mlp_scaled.default,
    aten._moe_mlp_scaled_backward.default,
):
    _keep(_op)
