"""The experts of transformers as expert parallelism sees them: ``ExpertParallel(adapter=ADAPTER)``.

    from transformers_parallel import ADAPTER
    model, plan = parallelize_moe(model, batch=64, seq=4096, adapter=ADAPTER)

Which experts ``F.moe_mlp`` computes and how is :mod:`moe_mlp_experts`'; others are refused.
"""

from moe_mlp_experts import compute, first_name, plan_of, stored

from torch import nn, Tensor
from torch.distributed.tensor.parallel import ExpertParallel


class ExpertsAdapter(ExpertParallel.Adapter):
    """Modules called as ``experts(hidden_states, top_k_index, top_k_weights)``.

    Raises:
        NotImplementedError: ``F.moe_mlp`` cannot compute a module's experts; says why.
    """

    def matches(self, module: nn.Module) -> bool:
        # What use_experts_implementation of transformers gives a class.
        return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")

    def expert_parameters(self, module: nn.Module) -> dict[str, int | None]:
        plan = plan_of(module)
        reason = "FP8Experts is for inference" if plan.fp8 else plan.reason
        if reason is not None:
            raise NotImplementedError(f"ExpertParallel: {reason}")
        first, transposed = first_name(module), module.is_transposed
        dims: dict[str, int | None] = {first: 2 if transposed else 1}
        dims["down_proj"] = 1 if transposed else 2
        if module.has_bias:
            dims |= {f"{first}_bias": 1, "down_proj_bias": None}
        return dims

    def run(
        self, module, original, exchange, hidden_states, top_k_index, top_k_weights
    ) -> Tensor:
        plan = plan_of(module)

        def experts(rows, ids, weights, num_rows: int | None = None) -> Tensor:
            routed = (rows, ids, weights)
            return compute(module, plan, routed, stored(module), num_rows)

        return exchange(hidden_states, top_k_index, top_k_weights, experts)


ADAPTER = ExpertsAdapter()
