"""Expert parallelism as a parallel style."""

from __future__ import annotations

import functools
import types
from typing import Any, cast, Literal, TYPE_CHECKING

import torch
from torch import nn, Tensor
from torch.distributed._moe.adapters import DEFAULT_ADAPTERS, ExpertAdapter, Experts
from torch.distributed._moe.all_to_all import TokenSwitchAllToAll
from torch.distributed._token_switch import TokenSwitch
from torch.distributed.tensor import (
    DeviceMesh,
    distribute_tensor,
    DTensor,
    Partial,
    Replicate,
    Shard,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.utils.stateless import _reparametrize_module


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.tensor.placement_types import Placement

    Schedule = Callable[
        [
            TokenSwitch,
            Tensor,
            Tensor,
            Tensor,
            Experts,
            Callable[[], Tensor | None] | None,
        ],
        tuple[Tensor, Tensor | None],
    ]


__all__ = ["ExpertParallel", "sequential_schedule", "token_switches"]


def sequential_schedule(
    switch: TokenSwitch,
    tokens: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor,
    experts: Experts,
    shared: Callable[[], Tensor | None] | None,
) -> tuple[Tensor, Tensor | None]:
    """Dispatch, experts, combine, shared experts, one after the other.

    The order in which the parts of a layer run is a function of this signature, and
    ``ExpertParallel(schedule=...)`` takes another one.

    Args:
        switch (TokenSwitch): takes tokens to the ranks of their experts and back.
        tokens (Tensor): (T, D) of this rank.
        topk_indices (Tensor): (T, K) ids in [-1, E].
        topk_weights (Tensor): (T, K).
        experts (Experts): the local experts, see
            :class:`torch.distributed._moe.adapters.Experts`.
        shared (callable, optional): the shared experts of all tokens.

    Returns:
        (Tensor, Tensor or None): (T, D) routed output, and what ``shared`` returned.
    """
    routing = switch.create_routing(topk_indices, layout="flat")
    rows, weights, ids = switch.dispatch(routing, tokens, topk_weights)
    if weights is None or ids is None:
        raise AssertionError("the flat layout has weights and ids")
    num_slots = getattr(switch, "num_slots", None)
    num_rows = None if num_slots is None else num_slots(routing)
    output = switch.combine(routing, experts(rows, ids, weights, num_rows))
    return output, None if shared is None else shared()


class _Region:
    """What a parallelized module keeps: token switch, and placements of gradients.

    Shared by copies of the module, as process groups can't be copied.
    """

    def __init__(
        self,
        adapter: ExpertAdapter,
        switch: TokenSwitch,
        schedule: Schedule,
        tp_mesh: DeviceMesh | None,
        original: dict[str, Callable[..., Any]],
    ) -> None:
        self.adapter = adapter
        self.switch = switch
        self.schedule = schedule
        self.tp_mesh = tp_mesh
        self.original = original
        self.expert_names: tuple[str, ...] = ()
        self.grad_placements: dict[str, tuple[Placement, ...]] = {}
        self.added_once: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Region:
        return self

    def local_parameters(self, module: nn.Module) -> dict[str, Tensor]:
        """Local shards, whose gradients go back to the distributed parameters."""
        local = {}
        for name, grad_placements in self.grad_placements.items():
            owner, _, leaf = name.rpartition(".")
            param = getattr(module.get_submodule(owner), leaf)
            if not isinstance(param, DTensor):
                raise RuntimeError(
                    f"ExpertParallel: parameter {name!r} must be the DTensor that "
                    f"parallelize_module made, got {type(param).__name__}"
                )
            if any(p.is_partial() for p in grad_placements):
                # Its backward sums the partial gradients.
                param = param.redistribute(placements=param.placements)
            tensor = param.to_local(grad_placements=grad_placements)
            if name in self.added_once and self.tp_mesh is not None:
                tensor = tensor * float(self.tp_mesh.get_local_rank() == 0)
            local[name] = tensor
        return local

    def exchange(
        self,
        input: Tensor,
        topk_indices: Tensor,
        topk_weights: Tensor | None,
        experts: Experts,
        shared: Callable[[], Tensor | None] | None = None,
    ) -> Tensor:
        """See :class:`torch.distributed._moe.adapters.ExpertExchange`."""
        tokens = input.flatten(0, -2)
        ids = topk_indices.flatten(0, -2)
        if topk_weights is None:
            weights = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
        else:
            weights = topk_weights.flatten(0, -2)
        if self.tp_mesh is not None:
            tokens = self._copy_to_tensor_parallel(tokens)
            weights = self._copy_to_tensor_parallel(weights)
        output, shared_output = self.schedule(
            self.switch, tokens, ids, weights, experts, shared
        )
        if self.tp_mesh is not None:
            summands = DTensor.from_local(output, self.tp_mesh, [Partial()])
            output = summands.redistribute(placements=[Replicate()]).to_local()
        output = output.view(input.shape)
        return output if shared_output is None else output + shared_output

    def _copy_to_tensor_parallel(self, x: Tensor) -> Tensor:
        """``x``, whose gradient is summed over the ranks of the tensor parallel mesh."""
        copy = DTensor.from_local(x, self.tp_mesh, [Replicate()], run_check=False)
        return copy.to_local(grad_placements=[Partial()])


def _region_of(module: nn.Module) -> _Region:
    return cast("_Region", module._expert_parallel)


def _parallel_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    region = _region_of(module)
    for value in (*args, *kwargs.values()):
        if isinstance(value, DTensor):
            raise TypeError(
                "ExpertParallel: input must be the tokens of this rank as a plain tensor, "
                f"got a DTensor with {value.placements}; use PrepareModuleInput with "
                "use_local_output=True"
            )
    with _reparametrize_module(module, region.local_parameters(module)):
        if region.adapter.method == "forward":
            return _parallel_method(module, *args, **kwargs)
        return region.original["forward"](module, *args, **kwargs)


def _parallel_method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    region = _region_of(module)
    # Not a bound method, which torch.compile can't make.
    original = functools.partial(region.original[region.adapter.method], module)
    return region.adapter.run(module, original, region.exchange, *args, **kwargs)


class ExpertParallel(ParallelStyle):
    """
    Spread the experts of a Mixture-of-Experts module over the ranks of a mesh. Supports
    :class:`torch.nn.MoE`, modules shaped like torchtitan's ``GroupedExperts``, and others
    through an adapter.

    Every rank keeps its own tokens. Each token is sent to the ranks that have its experts,
    and the experts' outputs are sent back and summed. The expert parameters become DTensors
    with ``Shard(0)``; the other parameters of the module, router and shared experts,
    are left as they are.

    The mesh is 1-D, or has named dims: ``ep_dim`` shards the experts; ``tp_dim``, if there is
    one, shards the hidden dim of each expert, and its ranks must have the same tokens;
    ``replicate_dim``, if there is one, has copies of the experts, whose gradients are
    summed over it in backward.

    Keyword Args:
        combine (str): ``"reduce"`` sends least, ``"exact"`` gives the output, the input
            gradient and the router gradient the bits that one rank would compute.
            Default: ``"reduce"``
        capacity (int, optional): rows for every pair of ranks, for static shapes;
            ``None`` sends exactly what there is. Default: None
        wire_dtype (torch.dtype, optional): precision of tokens on their way to the
            experts. Default: None (the dtype of the tokens)
        token_switch (callable, optional): ``token_switch(ep_mesh, num_experts)`` makes the
            :class:`TokenSwitch` that communicates, instead of
            :class:`TokenSwitchAllToAll` with the three options above. Default: None
        schedule (callable): order of communication and computation.
            Default: :func:`sequential_schedule`
        adapter (ExpertAdapter, optional): describes the module. Default: None (found by the
            module)
        sequence_parallel_mesh (DeviceMesh, optional): 1-D mesh over which the tokens of the
            module are sharded although its router and shared experts are not:
            those become replicated DTensors, whose gradients are summed over it. Default: None
        ep_dim (str): dim of an N-D mesh. Default: ``"ep"``
        tp_dim (str): dim of an N-D mesh. Default: ``"tp"``
        replicate_dim (str): dim of an N-D mesh. Default: ``"dp_replicate"``
    Returns:
        A :class:`ParallelStyle` object that represents expert parallelism of the module.

    Example::
        >>> # xdoctest: +SKIP(failing)
        >>> from torch.distributed.tensor.parallel import parallelize_module, ExpertParallel
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> ...
        >>> m = Model(...)  # m has a nn.MoE submodule "moe"
        >>> ep_mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("ep",))
        >>> m = parallelize_module(m, ep_mesh, {"moe": ExpertParallel()})

    .. note:: A gradient of an expert is the sum over the tokens of all ranks of the mesh, as
        its tokens are on one rank. Data parallelism that averages gradients over N ranks
        must divide the experts' by the same N, see
        :meth:`~torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor`.
    """

    def __init__(
        self,
        *,
        combine: Literal["reduce", "exact"] = "reduce",
        capacity: int | None = None,
        wire_dtype: torch.dtype | None = None,
        token_switch: Callable[[DeviceMesh, int], TokenSwitch] | None = None,
        schedule: Schedule = sequential_schedule,
        adapter: ExpertAdapter | None = None,
        sequence_parallel_mesh: DeviceMesh | None = None,
        ep_dim: str = "ep",
        tp_dim: str = "tp",
        replicate_dim: str = "dp_replicate",
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "combine": combine,
            "capacity": capacity,
            "wire_dtype": wire_dtype,
        }
        defaults = {"combine": "reduce", "capacity": None, "wire_dtype": None}
        if token_switch is not None and options != defaults:
            raise ValueError(
                "ExpertParallel: combine, capacity and wire_dtype are options of the "
                f"default token switch, got {options} next to token_switch"
            )
        if sequence_parallel_mesh is not None and sequence_parallel_mesh.ndim != 1:
            raise ValueError(
                "ExpertParallel: sequence_parallel_mesh must be 1-D, got a "
                f"{sequence_parallel_mesh.ndim}-D mesh with dims "
                f"{sequence_parallel_mesh.mesh_dim_names}"
            )
        self.switch_options = options
        self.token_switch = token_switch
        self.schedule = schedule
        self.adapter = adapter
        self.sequence_parallel_mesh = sequence_parallel_mesh
        self.ep_dim = ep_dim
        self.tp_dim = tp_dim
        self.replicate_dim = replicate_dim

    def _make_switch(self, ep_mesh: DeviceMesh, num_experts: int) -> TokenSwitch:
        if self.token_switch is None:
            return TokenSwitchAllToAll(
                ep_mesh.get_group(), num_experts, **self.switch_options
            )
        switch = self.token_switch(ep_mesh, num_experts)
        if not isinstance(switch, TokenSwitch):
            raise TypeError(
                "ExpertParallel: token_switch must return a TokenSwitch, got "
                f"{type(switch).__name__}"
            )
        return switch

    def _find_adapter(self, module: nn.Module) -> ExpertAdapter:
        if self.adapter is not None:
            return self.adapter
        for adapter in DEFAULT_ADAPTERS:
            if adapter.matches(module):
                return adapter
        shapes = {n: tuple(p.shape) for n, p in module.named_parameters(recurse=False)}
        raise NotImplementedError(
            "ExpertParallel: module must be a nn.MoE or have three-dimensional parameters "
            "w1, w2 and w3 with the experts first, or adapter must be given; got "
            f"{type(module).__name__} with parameters {shapes}"
        )

    def _roles(self, mesh: DeviceMesh) -> tuple[str, ...]:
        """Of each mesh dim: "ep", "tp" or "replicate"."""
        if mesh.ndim == 1:
            return ("ep",)
        names = {
            self.ep_dim: "ep",
            self.tp_dim: "tp",
            self.replicate_dim: "replicate",
        }
        dims = mesh.mesh_dim_names or ()
        unknown = [dim for dim in dims if dim not in names]
        if not dims or unknown or self.ep_dim not in dims:
            raise ValueError(
                "ExpertParallel: device_mesh must be 1-D, or have a dim "
                f"ep_dim={self.ep_dim!r} and besides it only tp_dim={self.tp_dim!r} "
                f"and replicate_dim={self.replicate_dim!r}; got a {mesh.ndim}-D mesh with "
                f"dims {mesh.mesh_dim_names}"
            )
        return tuple(names[dim] for dim in dims)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if hasattr(module, "_expert_parallel"):
            raise RuntimeError("ExpertParallel: module is already expert parallel")
        adapter = self._find_adapter(module)
        roles = self._roles(device_mesh)
        dims = adapter.expert_parameters(module)
        num_experts = self._check(module, adapter, dims, roles, device_mesh)
        names = device_mesh.mesh_dim_names or ()
        mesh_of = {
            role: device_mesh if device_mesh.ndim == 1 else device_mesh[names[i]]
            for i, role in enumerate(roles)
        }
        region = _Region(
            adapter,
            self._make_switch(mesh_of["ep"], num_experts),
            self.schedule,
            mesh_of.get("tp"),
            {
                name: getattr(module, name).__func__
                for name in ("forward", adapter.method)
            },
        )
        region.expert_names = tuple(dims)
        for name, hidden_dim in dims.items():
            placements, grads = zip(*(_placements(role, hidden_dim) for role in roles))
            self._distribute(module, name, device_mesh, placements)
            region.grad_placements[name] = grads
            if hidden_dim is None:
                region.added_once.add(name)
        if self.sequence_parallel_mesh is not None:
            for name, _ in list(module.named_parameters()):
                if name not in dims:
                    self._distribute(
                        module, name, self.sequence_parallel_mesh, [Replicate()]
                    )
                    region.grad_placements[name] = (Partial(),)
        module._expert_parallel = region  # pyrefly: ignore[bad-argument-type]
        module.forward = types.MethodType(_parallel_forward, module)
        if adapter.method != "forward":
            setattr(module, adapter.method, types.MethodType(_parallel_method, module))
        return module

    def _check(
        self,
        module: nn.Module,
        adapter: ExpertAdapter,
        dims: dict[str, int | None],
        roles: tuple[str, ...],
        mesh: DeviceMesh,
    ) -> int:
        """Raises if ``module`` can't be spread over ``mesh``; the number of experts."""
        shapes = {}
        for name in dims:
            try:
                param = module.get_parameter(name)
            except AttributeError as error:
                raise AttributeError(
                    f"ExpertParallel: {type(adapter).__name__} expects a parameter "
                    f"{name!r} in {type(module).__name__}"
                ) from error
            if isinstance(param, DTensor):
                raise ValueError(
                    f"ExpertParallel: parameter {name!r} is already distributed as "
                    f"{param.placements}; expert parallelism comes before data parallelism"
                )
            shapes[name] = tuple(param.shape)
        counts = {shape[0] for shape in shapes.values()}
        if len(counts) != 1:
            raise ValueError(
                "ExpertParallel: expert parameters must have the experts on dim 0, got "
                f"shapes {shapes}"
            )
        num_experts = counts.pop()
        ep_size = mesh.size(roles.index("ep"))
        if num_experts % ep_size:
            raise ValueError(
                f"ExpertParallel: the number of experts must be a multiple of the {ep_size} "
                f"ranks of device_mesh, got {num_experts} experts in "
                f"{type(module).__name__}"
            )
        if "tp" in roles:
            adapter.check_tensor_parallel(module)
            tp_size = mesh.size(roles.index("tp"))
            for name, dim in dims.items():
                hidden = None if dim is None else shapes[name][dim]
                if hidden is not None and hidden % tp_size:
                    raise ValueError(
                        f"ExpertParallel: dim {dim} of {name!r} must be a multiple of the "
                        f"{tp_size} ranks of {self.tp_dim!r}, got shape {shapes[name]}"
                    )
        return num_experts

    def _distribute(
        self,
        module: nn.Module,
        name: str,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
    ) -> None:
        param = module.get_parameter(name)
        owner, _, leaf = name.rpartition(".")
        distributed = distribute_tensor(
            param, mesh, placements, src_data_rank=self.src_data_rank
        )
        module.get_submodule(owner).register_parameter(
            leaf, nn.Parameter(distributed, requires_grad=param.requires_grad)
        )

    def __repr__(self) -> str:
        tmpstr = self.__class__.__name__ + "("
        if self.token_switch is None:
            tmpstr += ", ".join(f"{k}={v!r}" for k, v in self.switch_options.items())
        else:
            tmpstr += f"token_switch={self.token_switch!r}"
        return tmpstr + ")"


def _placements(role: str, hidden_dim: int | None) -> tuple[Placement, Placement]:
    """Of an expert parameter on a mesh dim: itself, and its local gradient."""
    if role == "ep":
        return Shard(0), Shard(0)
    if role == "tp" and hidden_dim is not None:
        return Shard(hidden_dim), Shard(hidden_dim)
    return Replicate(), Partial()


def token_switches(model: nn.Module) -> list[TokenSwitch]:
    """Token switches of the expert parallel modules in ``model``, in module order.

    For ``check_overflow`` after a step, or
    :func:`torch.distributed._moe.rerun.grow_and_rerun`.
    """
    regions = [getattr(m, "_expert_parallel", None) for m in model.modules()]
    return [region.switch for region in regions if region is not None]
