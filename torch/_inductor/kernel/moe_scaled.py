"""Why ``aten::_moe_mlp_scaled``, its backward and ``aten::_moe_quantize`` stay calls.

Their Triton kernels (torch/_native/ops/moe_scaled, moe/quantize_impl.py) are reached through the operator:
Inductor does not trace them yet, as kernel/moe.py does those of ``_moe_mlp``. So an AOTInductor package runs
the composites, which turn every weight into 16 bits on each call. TORCH_LOGS="+inductor" says so once for
every call that is compiled.
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
            or "Inductor does not trace Triton kernels for operands of 8 bits",
        )
        return fallback(first, *rest, **options)


for _op in (
    aten._moe_quantize.default,
    aten._moe_mlp_scaled.default,
    aten._moe_mlp_scaled_backward.default,
):
    _keep(_op)
