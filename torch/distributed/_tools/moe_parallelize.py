# mypy: allow-untyped-defs
"""From a model to its best parallel run: :func:`parallelize_moe` plans, and applies the plan.

It is private, like the planner: the styles of ``torch.distributed.tensor.parallel`` only
do what they are told, and this module decides. :func:`.moe_plan.plan` chooses the layout.
``ExpertParallel``, ``parallelize_module``,
``checkpoint`` and ``fully_shard`` apply it, in this order.
"""

from __future__ import annotations

import functools
import os
from typing import Any, cast, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed._tools.moe_arguments import check_dtypes
from torch.distributed._tools.moe_config import MoEConfig
from torch.distributed._tools.moe_machine import device_type, machine_profile
from torch.distributed._tools.moe_plan import Plan, plan
from torch.distributed._tools.moe_profile import Profile, profile as known_profile
from torch.distributed._tools.moe_trace import layers_with, matched, trace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ExpertParallel,
    parallelize_module,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel._expert_adapters import (
    DEFAULT_ADAPTERS,
    GroupedExpertsAdapter,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.distributed.tensor.parallel._expert_adapters import ExpertAdapter


__all__ = [
    "apply_plan",
    "block_names",
    "default_tp_plan",
    "expert_names",
    "parallelize_moe",
]


def parallelize_moe(
    model: nn.Module,
    *,
    batch: int,
    seq: int = 4096,
    profile: Profile | str | None = None,
    adapter: ExpertAdapter | None = None,
    tp_plan: Mapping[str, str] | None = None,
    loss: Callable[[nn.Module], torch.Tensor] | None = None,
    dtypes: Sequence[str] | None = None,
    load: Sequence[float] | None = None,
    compile: bool = False,
    dry_run: bool = False,
    **fixed: Any,
) -> tuple[nn.Module, Plan]:
    """Plans the parallel run of ``model`` on all ranks of this program, and applies it.

    Collective over the default process group, which is made here under torchrun or with WORLD_SIZE
    in the environment. The model must be the same on all ranks, or on the meta device, and is
    changed in place. It is then trained as on one rank, with :meth:`.Plan.micro_batches` of every batch.

    Args:
        model (nn.Module): has experts that ``ExpertParallel`` finds an adapter for.

    Keyword Args:
        batch (int): sequences of a step, of all ranks.
        seq (int): tokens of a sequence.
        profile (Profile or str, optional): of the machine, or a name that
            :func:`.moe_profile.profile` knows. Default: measured once, see
            :func:`.moe_machine.machine_profile`
        adapter (ExpertAdapter, optional): see ``ExpertParallel``.
        tp_plan (mapping, optional): ``"colwise"``, ``"rowwise"`` or
            ``"replicated_with_grad_allreduce"`` by the names of modules, ``*`` for a layer. The model is not
            tensor parallel without one. Default: ``base_model_tp_plan`` of the model's configuration
        loss (callable, optional): loss of the model for one sequence, which the planner traces on a
            CPU. Default: ``model(input_ids=ids, labels=ids)``
        dtypes (sequence of str, optional): dtypes of products to choose from. ``"fp8"`` and
            ``"mxfp8"`` are recipes of ``nn.MoE``. Default: that of the parameters on a CPU, else bf16
        load (sequence of float, optional): current load of every expert, see :func:`.moe_plan.plan`. If
            experts get replicas for it, call ``plan.placement.step()`` after every
            optimizer step; it moves experts once it has planned.
        compile (bool): compiles the layers one by one.
        dry_run (bool): changes nothing.
        fixed: given choices, such as ``ep=4``; see :class:`.moe_layout.Layout`. Values
            that cannot be applied are an error.

    Returns:
        The model, and its plan.

    Raises:
        ValueError: the model is parallel already; or nothing divides or fits, or a fixed choice cannot be
            applied. One line, with the nearest choice that can.

    Example::
        >>> # xdoctest: +SKIP("needs ranks")
        >>> model, plan = parallelize_moe(model, batch=64, seq=4096)
        >>> print(plan.explain())
        >>> micros = plan.micro_batches(ids)
        >>> for micro in micros:
        ...     loss = model(input_ids=micro, labels=micro).loss / len(micros)
        ...     loss.backward()
        >>> optimizer.step()
        >>> if plan.placement is not None:  # with load
        ...     plan.placement.step()
    """
    check_dtypes("parallelize_moe", dtypes)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parallelize_moe: model must not be parallel yet, got a DTensor as {name}; plan "
                "and apply once, before other styles"
            )
    experts, blocks = expert_names(model, adapter), block_names(model, adapter)
    config = MoEConfig.from_module(model)
    if tp_plan is None:
        tp_plan = default_tp_plan(model)
    # Another launcher sets the environment, too, and a plan for one rank would be wrong there.
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    if not dist.is_initialized() and (several or dist.is_torchelastic_launched()):
        dist.init_process_group()
    device = device_type()
    world = dist.get_world_size() if dist.is_initialized() else 1
    p = known_profile(profile) if isinstance(profile, str) else profile
    p = machine_profile(device) if p is None else p
    allowed = _allowed(model, config, experts, adapter, tp_plan, p)
    if unknown := fixed.keys() - allowed.keys():
        raise ValueError(
            f"parallelize_moe: fixed must be of {', '.join(allowed)}, got "
            f"{', '.join(sorted(unknown))}"
        )
    traced, known = None, dict[str, Any](fsdp=True, pp=1, kernel="moe_mlp")
    if p.cpu is not None:
        traced = trace(model, p, seq, experts, blocks, adapter, loss, tp_plan)
    if allowed["tp"][0]:
        known["tp"] = 1
    products = (_parameter_dtype(model) if p.cpu is not None else "bf16",)
    search = functools.partial(
        plan, config, p, world, global_batch=batch, seq=seq, load=load, traced=traced
    )
    allowed["dtypes"] = allowed["dtype"]
    asked = (*fixed.items(), *(("dtypes", dtype) for dtype in dtypes or ()))
    refused = [(n, v) for n, v in asked if allowed[n][0] and v not in allowed[n][0]]
    if refused:
        name, got = refused[0]
        rest = {n: v for n, v in fixed.items() if (n, v) not in refused}
        x = search(**{**rest, **known}, dtypes=products).layout
        values, why = allowed[name]
        raise ValueError(
            f"parallelize_moe: {name}={got} cannot be applied: {why}; nearest that can: "
            f"{' or '.join(f'{name}={value}' for value in values)} with ep={x.ep} tp={x.tp} "
            f"micro_batch={x.micro_batch}"
        )
    found = search(**{**fixed, **known}, dtypes=products if dtypes is None else dtypes)
    if not dry_run:
        apply_plan(
            model, found, adapter=adapter, tp_plan=tp_plan, compile=compile, device=device
        )  # fmt: skip
    return model, found


def apply_plan(
    model: nn.Module,
    found: Plan,
    *,
    adapter: ExpertAdapter | None = None,
    tp_plan: Mapping[str, str] | None = None,
    compile: bool = False,
    device: str | None = None,
) -> nn.Module:
    """Applies a plan to a model, in place; arguments as in :func:`parallelize_moe`.

    The mesh is ``(dp_shard, tp)``, for experts ``(efsdp, ep)``, with ``dp_replicate`` in front
    if there is more than one copy of the shards. Between the products of tensor
    parallelism, ranks of ``tp`` have the same tokens, and each sends its share to the experts.
    """
    x = found.layout
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        # The cache keeps keys and values, twice if they are recomputed.
        config.use_cache = False
    experts, blocks = expert_names(model, adapter), block_names(model, adapter)
    sizes = {"dp_replicate": x.replicate, "dp_shard": x.dp // x.replicate, "tp": x.tp}
    if x.replicate == 1:
        del sizes["dp_replicate"]
    dense = init_device_mesh(
        device or device_type(), (*sizes.values(),), mesh_dim_names=(*sizes,)
    )
    sparse = ExpertParallel.fold_mesh(dense, x.ep)
    shards, copies = ("dp_shard", "efsdp"), tuple(sizes)[:-2]
    dp, efsdp = (
        mesh[(*copies, name)] if copies else mesh[name]
        for mesh, name in zip((dense, sparse), shards)
    )
    if x.tp > 1:
        tp_plan = default_tp_plan(model) if tp_plan is None else tp_plan
        styles = {name: _TENSOR_PARALLEL[style]() for name, style in tp_plan.items()}
        for name in experts:
            styles[name] = _token_shares(model.get_submodule(name))
        parallelize_module(model, dense["tp"], styles)
    recipe = {"fp8": "fp8_blockwise", "mxfp8": "mxfp8"}.get(x.dtype)
    options = found.expert_parallel()
    for name in experts:
        if recipe is not None:
            cast("Any", model.get_submodule(name)).recipe = recipe
    if x.tp > 1:
        # Router and shared experts of nn.MoE also get only a share of the tokens.
        options["sequence_parallel_mesh"] = dense["tp"]
    style = ExpertParallel(adapter=adapter, **options)
    parallelize_module(model, sparse["ep"], dict.fromkeys(experts, style))
    modules = [model.get_submodule(name) for name in blocks]
    if x.recompute == "full":
        # Results of collectives are kept, so nothing is sent again.
        for block in modules:
            checkpoint(block, context_fn=ExpertParallel.save_communication())
    if compile:
        for block in modules:
            block.compile()
    policy = MixedPrecisionPolicy()
    if x.dtype != "fp32" and _parameter_dtype(model) == "fp32":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    placement = ExpertParallel.shard_placement(model, efsdp, dp)
    kw: dict[str, Any] = {"mesh": dp, "mp_policy": policy}
    for block in modules:
        sharded = fully_shard(block, shard_placement_fn=placement, **kw)
        sharded.set_gradient_divide_factor(dp.size())
    if not any(block is model for block in modules):
        fully_shard(model, **kw)
    return model


# ---- the model -------------------------------------------------------------------------


def expert_names(model: nn.Module, adapter: ExpertAdapter | None) -> list[str]:
    """Names of the modules that ``ExpertParallel`` takes."""
    adapters = DEFAULT_ADAPTERS if adapter is None else (adapter,)
    found = [n for n, m in model.named_modules() if any(a.matches(m) for a in adapters)]
    if not found:
        raise ValueError(
            "parallelize_moe: model must have experts that ExpertParallel knows, nn.MoE or "
            "stacked w1, w2 and w3, or adapter must be given; got none in "
            f"{type(model).__name__}"
        )
    return found


def _allowed(
    model: nn.Module,
    config: MoEConfig,
    experts: Sequence[str],
    adapter: ExpertAdapter | None,
    tp_plan: Mapping[str, str],
    p: Profile,
) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Values of each choice that can be applied (empty: all that divide), and why no others can."""
    modules = [model.get_submodule(name) for name in experts]
    adapters = DEFAULT_ADAPTERS if adapter is None else (adapter,)
    kinds = [next(a for a in adapters if a.matches(m)) for m in modules]
    tp: tuple[tuple[int, ...], str] = (), ""
    if not tp_plan:
        tp = (1,), "the model has no tp_plan for its attention"
    elif any(isinstance(kind, GroupedExpertsAdapter) for kind in kinds):
        tp = (1,), "experts that are called with rows and counts get no share of tokens"
    dtypes = [_parameter_dtype(model)]
    if dtypes == ["fp32"]:
        dtypes.append("bf16")
    if all(isinstance(m, nn.MoE) for m in modules):
        dtypes += [d for d in ("fp8", "mxfp8") if d in p.device.dtypes]
    one = (1,)
    return {
        **dict.fromkeys(("ep", "replicate", "micro_batch", "domain"), ((), "")),
        **dict.fromkeys(("gradient_bytes", "optimizer_bytes"), ((), "")),
        "tp": tp,
        **dict.fromkeys(("pp", "virtual"), (one, "a model is not cut into stages here")),
        "cp": (one, "attention does not know of context parallelism"),
        "expert_tp": (one, "an expert stays whole, for FSDP to shard"),
        "fsdp": ((True,), "all parameters are sharded"),
        "recompute": (("none", "full"), "a layer is checkpointed whole, or not"),
        "dtype": ((*dtypes,), "FSDP casts float32 to bf16; 8 bits are a recipe of nn.MoE on some GPUs"),
        "wire": (("bf16", "fp8"), "ExpertParallel sends the rows' dtype or float8_e4m3fn"),
        "algorithm": (("hierarchical",), "ep and domain decide how tokens are sent"),
        "node_limit": ((config.node_limit,), "the router is the model's"),
        "graphs": ((0,), "nothing is captured here"),
        "kernel": (("moe_mlp",), "experts are computed by F.moe_mlp"),
    }  # fmt: skip


def block_names(model: nn.Module, adapter: ExpertAdapter | None) -> list[str]:
    """Names of the layers: members of the outermost lists that hold experts, or the model."""
    return layers_with(model, expert_names(model, adapter))


def _parameter_dtype(model: nn.Module) -> str:
    """Dtype of most parameters, as a key of ``moe_cost_model.ITEMSIZE``."""
    dtype = max(model.parameters(), key=torch.Tensor.numel).dtype
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")


def default_tp_plan(model: nn.Module) -> dict[str, str]:
    """The plan of a transformers model without its experts; empty if it lacks attention."""
    plan_of_base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    known = {
        prefix + name: style
        for name, style in (plan_of_base or {}).items()
        if style in _TENSOR_PARALLEL and ".experts" not in name
    }
    known = {name: style for name, style in known.items() if [*matched(model, (name,))]}
    return known if any("attn" in name for name in known) else {}


def _token_shares(module: nn.Module) -> PrepareModuleInputOutput:
    """Each rank of tp sends its share of equal tokens to the experts; all ranks get all results.

    ``nn.MoE`` is called with tokens (\\*, D), others with tokens, expert ids and weights.
    """
    inputs, tokens = (1, Shard(-2)) if isinstance(module, nn.MoE) else (3, Shard(0))
    return PrepareModuleInputOutput(
        input_layouts=(Replicate(),) * inputs, desired_input_layouts=(tokens,) * inputs,
        use_local_input=True, output_layouts=tokens, desired_output_layouts=Replicate(),
    )  # fmt: skip


_TENSOR_PARALLEL: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # A norm over heads of this rank, (B, S, heads, D), whose gradient is summed.
    "replicated_with_grad_allreduce": functools.partial(
        SequenceParallel, sequence_dim=2, use_local_output=True
    ),
}
