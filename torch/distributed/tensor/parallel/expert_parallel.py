"""Expert parallelism as a parallel style."""

from __future__ import annotations

import functools
import itertools
import types
from typing import Any, cast, Literal, TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn, Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed._local_tensor import local_tensor_mode
from torch.distributed._moe.agreement import check_counts
from torch.distributed._moe.all_gather import TokenSwitchAllGather
from torch.distributed._moe.all_to_all import (
    any_rank,
    grow_and_rerun,
    TokenSwitchAllToAll,
    TokenSwitchHierarchical,
)
from torch.distributed._moe.groups import sub_group
from torch.distributed._moe.overlap_schedule import OverlapSchedule, sequential_schedule
from torch.distributed._moe.recompute import save_communication
from torch.distributed._token_switch import TokenSwitch
from torch.distributed.tensor import (
    DeviceMesh,
    distribute_tensor,
    DTensor,
    Partial,
    Replicate,
    Shard,
)
from torch.distributed.tensor.parallel._expert_adapters import (
    check_parametrizations,
    DEFAULT_ADAPTERS,
    ExpertAdapter,
    Experts,
    GroupedExpertsAdapter,
    present_name,
    trained_parameters,
)
from torch.distributed.tensor.parallel._expert_mesh import (
    expert_shard_placement,
    fold_expert_parallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.utils import parametrize
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.weak import WeakTensorKeyDictionary


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from torch.distributed.distributed_c10d import ProcessGroup

    R = TypeVar("R")
    from torch.distributed.tensor.parallel._expert_placed_layer import PlacedLayer
    from torch.distributed.tensor.parallel._expert_placement import ExpertPlacement
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


__all__ = ["ExpertParallel", "token_switches"]


_SWITCHES = ("all_to_all", "hierarchical", "all_gather")
# Numbers of layers for errors, in the order of parallelize_module on the ranks of a group.
_layers: WeakKeyDictionary[ProcessGroup, itertools.count] = WeakKeyDictionary()


class _Region:
    """State of a parallelized module: token switch, and placements of gradients.

    Copies of the module share it, as process groups can't be copied.
    """

    def __init__(
        self,
        adapter: ExpertAdapter,
        switch: TokenSwitch,
        schedule: Schedule,
        tp_mesh: DeviceMesh | None,
        ep_mesh: DeviceMesh,
        original: dict[str, Callable[..., Any]],
    ) -> None:
        self.adapter = adapter
        self.switch = switch
        self.schedule = schedule
        self.ep_mesh = ep_mesh
        self.tp_mesh = tp_mesh
        self.original = original
        self.placed: PlacedLayer | None = None
        self.expert_names: tuple[str, ...] = ()
        self.grad_placements: dict[str, tuple[Placement, ...]] = {}
        self.added_once: set[str] = set()
        # For the remaining ranks after others were lost.
        self.make_switch: Callable[[DeviceMesh, int], TokenSwitch]
        self.mesh_device_type = "cpu"
        self.tokens = 0  # of the running or failed forward
        # Versions of the expert parameters in the last local_parameters().
        self.versions: tuple[int, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Region:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "ExpertParallel: a parallelized module can't be pickled, as its process groups "
            "are of this program; save its state_dict, with torch.distributed.checkpoint"
        )

    def local_parameters(
        self, module: nn.Module, names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Local shards, whose gradients go back to the distributed parameters."""
        local, versions = {}, []
        keys = self.grad_placements if names is None else names
        for name, key in {present_name(module, key): key for key in keys}.items():
            grad_placements = self.grad_placements[key]
            eager = not torch.compiler.is_compiling()
            if eager and parametrize.is_parametrized(module, name):
                raise RuntimeError(
                    f"ExpertParallel: {name!r} was parametrized after parallelize_module, so its parts are "
                    "not sharded. PEFT's target_parameters does this in each forward; call "
                    "torch.nn.utils.moe_lora.add_lora before parallelize_module instead"
                )
            param = _value(module, name)
            if not isinstance(param, DTensor):
                raise RuntimeError(
                    f"ExpertParallel: parameter {name!r} must be the DTensor that "
                    f"parallelize_module made, got {type(param).__name__}"
                )
            if eager and key in self.expert_names:
                versions.append(-1 if param.is_inference() else param._version)
            if any(p.is_partial() for p in grad_placements):
                # Its backward sums the partial gradients.
                param = param.redistribute(placements=param.placements)
            tensor = param.to_local(grad_placements=grad_placements)
            if key in self.added_once and self.tp_mesh is not None:
                tensor = tensor * float(self.tp_mesh.get_local_rank() == 0)
            local[name] = tensor
        self.versions = tuple(versions)
        return local

    def exchange(
        self,
        module: nn.Module,
        input: Tensor,
        topk_indices: Tensor,
        topk_weights: Tensor | None,
        experts: Experts,
        shared: Callable[[], Tensor | None] | None = None,
    ) -> Tensor:
        """See :class:`ExpertExchange`; ``module`` has its local parameters."""
        # One token may come without its dim.
        tokens = torch.atleast_2d(input).flatten(0, -2)
        ids = torch.atleast_2d(topk_indices).flatten(0, -2)
        if topk_weights is None:
            weights = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
        else:
            weights = torch.atleast_2d(topk_weights).flatten(0, -2)
        if self.tp_mesh is not None:
            tokens = self._copy_to_tensor_parallel(tokens)
            weights = self._copy_to_tensor_parallel(weights)
        names = (present_name(module, name) for name in self.expert_names)
        local = {name: _value(module, name) for name in names}
        if self.placed is not None:
            row_bytes = tokens.shape[1] * tokens.element_size()
            if not torch.compiler.is_compiling():
                self.tokens = len(ids)
            ids, experts = self.placed.route(module, ids, local, row_bytes, experts)
        if isinstance(self.switch, TokenSwitchAllToAll):
            # A user's schedule may change rows before it passes them to the experts.
            known = self.schedule is sequential_schedule or isinstance(
                self.schedule, OverlapSchedule
            )
            self.switch.keep_scaled = known and self.adapter.takes_scaled(module)
            # Compared whenever sizes are exchanged; autocast on one rank would change it.
            self.switch.row_bytes = sum(
                t.shape[1] * t.element_size() for t in (tokens, weights)
            )
        if isinstance(self.switch, (TokenSwitchAllToAll, TokenSwitchAllGather)):
            gathers = isinstance(self.switch, TokenSwitchAllGather)  # without gradients
            recorded = torch.is_grad_enabled() and not gathers
            self.switch.requires_grad = (
                *(recorded and t.requires_grad for t in (tokens, weights)),
                *(recorded and t.requires_grad for t in local.values()),
                getattr(experts, "sends", False),
                # Decides the dtype that the experts return.
                torch.is_autocast_enabled(tokens.device.type),
            )
        output, shared_output = self.schedule(
            self.switch, tokens, ids, weights, experts, shared
        )
        if self.placed is not None and not torch.compiler.is_compiling():
            self.tokens = 0  # none of a forward that failed
        if self.tp_mesh is not None:
            summands = DTensor.from_local(output, self.tp_mesh, [Partial()])
            output = summands.redistribute(placements=[Replicate()]).to_local()
        # No view, as that of nn.Linear: pipeline stages detach outputs in place.
        output = torch.ops.aten._unsafe_view(output, input.shape)
        return output if shared_output is None else output + shared_output

    def _copy_to_tensor_parallel(self, x: Tensor) -> Tensor:
        """``x``, whose gradient is summed over the ranks of the tensor parallel mesh."""
        copy = DTensor.from_local(x, self.tp_mesh, [Replicate()], run_check=False)
        return copy.to_local(grad_placements=[Partial()])


def _value(module: nn.Module, name: str) -> Any:
    """A parameter, or its replacement during a call."""
    owner, _, leaf = present_name(module, name).rpartition(".")
    return getattr(module.get_submodule(owner), leaf)


def _region_of(module: nn.Module) -> _Region:
    return cast("_Region", module._expert_parallel)


def _parallel_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    region = _region_of(module)
    if not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level():
        raise RuntimeError(
            f"ExpertParallel: {type(module).__name__} was called inside a transform of torch.func, "
            "which can't see the gradients that other ranks send; use torch.autograd.grad"
        )
    for value in (*args, *kwargs.values()):
        if isinstance(value, DTensor):
            raise TypeError(
                "ExpertParallel: input must be the tokens of this rank as a plain tensor, "
                f"got a DTensor with {value.placements}; use PrepareModuleInput with "
                "use_local_output=True"
            )
        nested = isinstance(value, Tensor) and value.is_nested
        if nested and region.adapter.method != "forward":
            # It calls the module, and so this function, on the values.
            return region.original["forward"](module, *args, **kwargs)
    inside = region.adapter.method != "forward"
    run = region.original["forward"] if inside else _parallel_method
    others = [n for n in region.grad_placements if n not in region.expert_names]
    if not others:
        return run(module, *args, **kwargs)
    with _reparametrize_module(module, region.local_parameters(module, others)):
        return run(module, *args, **kwargs)


def _parallel_method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    region = _region_of(module)
    # Not a bound method, which torch.compile can't create.
    original = functools.partial(region.original[region.adapter.method], module)
    exchange = functools.partial(region.exchange, module)
    # Only here: a subclass that reads weights in its forward gets DTensors, which raise, and not
    # the experts of this rank.
    local = region.local_parameters(module, region.expert_names)
    with _reparametrize_module(module, local):
        return region.adapter.run(module, original, exchange, *args, **kwargs)


def _unbound_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """A method, of the class or replaced on the module, as a function of the module."""
    method = getattr(module, name)
    if getattr(method, "__self__", None) is module:
        return method.__func__
    return lambda _, *args, **kwargs: method(*args, **kwargs)


class ExpertParallel(ParallelStyle):
    """
    Spread the experts of a Mixture-of-Experts module over the ranks of a mesh. Supports
    :class:`torch.nn.MoE`, experts called with rows in expert order, and others
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
        combine (str): ``"reduce"`` sends fewest bytes; ``"exact"`` gives output, input
            gradient and router gradient the bits that one rank would compute.
            Default: ``"reduce"``
        capacity (int or tuple[int, int], optional): rows for every pair of ranks, for static shapes;
            ``None`` sends no padding. With ``"hierarchical"`` a pair of
            numbers, for nodes and for ranks of a node. Default: None
        wire_dtype (torch.dtype, optional): precision of tokens on their way to the
            experts. Default: None (the dtype of the tokens)
        token_switch (str or callable): moves the tokens. ``"all_to_all"`` sends each token
            once to every rank that has one of its experts. ``"hierarchical"`` sends it once to every
            node, and from there to its ranks, see ``ranks_per_node``. ``"all_gather"`` sends
            all tokens to all ranks, for decoding without gradients, see ``max_tokens``.
            A function ``token_switch(ep_mesh, num_experts)`` returns a :class:`TokenSwitch`
            and excludes the other options. Default: ``"all_to_all"``
        ranks_per_node (int, optional): for ``"hierarchical"``, a divisor of the ranks of the
            mesh, which are in the order of the nodes. Default: None
        max_tokens (int, optional): for ``"all_gather"``, most tokens of a rank; equal on all
            ranks. Default: None
        placement (ExpertPlacement, optional): runs experts on other ranks than those of their
            parameters, by their loads. Needs a 1-D mesh. Default: None
        num_chunks (int): chunks of tokens; one is sent while another is
            computed. Equal on all ranks. Default: 1
        schedule (callable, optional): another order of communication and computation, in
            place of ``num_chunks``. Default: None
        adapter (ExpertAdapter, optional): describes the module. Default: None (the first known
            one that matches it)
        sequence_parallel_mesh (DeviceMesh, optional): 1-D mesh that shards the tokens of the
            module, but not its router and shared experts. Their parameters become replicated
            DTensors, and their gradients are summed over this mesh. Default: None
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

    .. note:: The gradient of an expert is the sum over the tokens of all ranks of the mesh, which
        are sent to its rank. Data parallelism that averages gradients over N ranks
        must divide the experts' by the same N, see
        :meth:`~torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor`.
    """

    def __init__(
        self,
        *,
        combine: Literal["reduce", "exact"] = "reduce",
        capacity: int | tuple[int, int] | None = None,
        wire_dtype: torch.dtype | None = None,
        token_switch: Literal["all_to_all", "hierarchical", "all_gather"]
        | Callable[[DeviceMesh, int], TokenSwitch] = "all_to_all",
        ranks_per_node: int | None = None,
        max_tokens: int | None = None,
        placement: ExpertPlacement | None = None,
        num_chunks: int = 1,
        schedule: Schedule | None = None,
        adapter: ExpertAdapter | None = None,
        sequence_parallel_mesh: DeviceMesh | None = None,
        ep_dim: str = "ep",
        tp_dim: str = "tp",
        replicate_dim: str = "dp_replicate",
    ) -> None:
        super().__init__()
        check_counts("ExpertParallel", num_chunks=num_chunks)
        options: dict[str, Any] = {
            "combine": combine,
            "capacity": capacity,
            "wire_dtype": wire_dtype,
        }
        defaults = {"combine": "reduce", "capacity": None, "wire_dtype": None}
        if isinstance(token_switch, str):
            if token_switch not in _SWITCHES:
                raise ValueError(
                    f"ExpertParallel: token_switch must be one of {list(_SWITCHES)} or a "
                    f"function, got {token_switch!r}"
                )
        if not isinstance(token_switch, str) or token_switch == "all_gather":
            if options != defaults:
                raise ValueError(
                    "ExpertParallel: combine, capacity and wire_dtype are options of "
                    "'all_to_all' and 'hierarchical', got "
                    f"{options} next to token_switch={token_switch!r}"
                )
        for name, value, switch in (
            ("ranks_per_node", ranks_per_node, "hierarchical"),
            ("max_tokens", max_tokens, "all_gather"),
        ):
            if (value is not None) != (token_switch == switch):
                raise ValueError(
                    f"ExpertParallel: {name} goes with token_switch={switch!r}, got "
                    f"{value} and {token_switch!r}"
                )
            if value is not None:
                check_counts("ExpertParallel", **{name: value})
        if sequence_parallel_mesh is not None and sequence_parallel_mesh.ndim != 1:
            raise ValueError(
                "ExpertParallel: sequence_parallel_mesh must be 1-D, got a "
                f"{sequence_parallel_mesh.ndim}-D mesh with dims "
                f"{sequence_parallel_mesh.mesh_dim_names}"
            )
        self.switch_options = options
        self.token_switch = token_switch
        self.ranks_per_node = ranks_per_node
        self.max_tokens = max_tokens
        if placement is not None and not hasattr(placement, "make_layer"):
            raise TypeError(
                f"ExpertParallel: placement must be an ExpertPlacement, got {placement!r}"
            )
        self.placement = placement
        plain = num_chunks == 1
        if schedule is None:
            schedule = sequential_schedule if plain else OverlapSchedule(num_chunks)
        elif not plain:
            raise ValueError(
                "ExpertParallel: num_chunks is of the default schedule, got "
                f"{num_chunks} next to schedule"
            )
        chunks = getattr(schedule, "num_chunks", 1)
        if token_switch == "all_gather" and chunks > 1:
            # The buffers of all_gather hold one dispatch.
            raise ValueError(
                f"ExpertParallel: token_switch='all_gather' has no chunks, got {chunks}"
            )
        self.schedule: Schedule = schedule
        self.adapter = adapter
        self.sequence_parallel_mesh = sequence_parallel_mesh
        self.ep_dim = ep_dim
        self.tp_dim = tp_dim
        self.replicate_dim = replicate_dim

    #: Base class of descriptions of a kind of module, see :attr:`adapter`.
    Adapter = ExpertAdapter
    #: Adapter of experts with three weights, by their names.
    GroupedExpertsAdapter = GroupedExpertsAdapter
    fold_mesh = staticmethod(fold_expert_parallel)
    shard_placement = staticmethod(expert_shard_placement)
    save_communication = staticmethod(save_communication)

    @staticmethod
    def check_overflow(model: nn.Module) -> None:
        """Raises on every rank if tokens did not fit ``capacity`` since the last check.

        That is on every rank of the mesh of the experts, replicas and ranks of FSDP included.
        Collective, and one sync for each layer. Call it once per step, before the optimizer uses
        the gradients.

        Args:
            model (nn.Module): has expert parallel modules.
        """
        # Every layer is asked: what it needed must not be found in a later step.
        errors = [e for switch in _static_switches(model) if (e := switch.overflow())]
        if any_rank(bool(errors), _gradient_groups(model)):
            other = "ExpertParallel: tokens were left out on ranks that share gradients with this one"
            raise RuntimeError(errors[0] if errors else f"{other}; see their errors")

    @staticmethod
    def grow_and_rerun(
        model: nn.Module,
        step: Callable[[], R],
        *,
        max_reruns: int = 2,
        group: ProcessGroup | None = None,
    ) -> R:
        """Runs ``step`` and, if tokens did not fit, again with enough capacity.

        Args:
            model (nn.Module): has expert parallel modules; all ranks rerun together.
            step (callable): forward and backward of one step. It may run again from the
                start, so it must zero its gradients itself, and change nothing else.

        Keyword Args:
            max_reruns (int): Default: 2
            group (ProcessGroup, optional): other ranks that ``step`` communicates with than
                those of the mesh of the experts. If one has to rerun, all do. Default: None

        Returns:
            What the last ``step`` returned; nothing was left out in it.
        """
        groups = _gradient_groups(model)
        if group is not None:
            groups.append(group)
        switches = _static_switches(model)
        return grow_and_rerun(switches, step, max_reruns=max_reruns, groups=groups)

    def _make_switch(self, ep_mesh: DeviceMesh, num_experts: int) -> TokenSwitch:
        """Switch over the ranks of ``ep_mesh``; rank r has the r-th experts."""
        switch: TokenSwitch
        if self.token_switch == "all_to_all":
            switch = TokenSwitchAllToAll(
                ep_mesh.get_group(), num_experts, **self.switch_options
            )
        elif self.token_switch == "hierarchical":
            per_node = cast(int, self.ranks_per_node)
            if ep_mesh.size() % per_node:
                raise ValueError(
                    "ExpertParallel: ranks_per_node must divide the "
                    f"{ep_mesh.size()} ranks of the mesh, got {per_node}"
                )
            mesh = _node_mesh(ep_mesh, per_node)
            switch = TokenSwitchHierarchical(mesh, num_experts, **self.switch_options)
        elif self.token_switch == "all_gather":
            switch = TokenSwitchAllGather(
                ep_mesh.get_group(), num_experts, max_tokens=cast(int, self.max_tokens)
            )
        else:
            make = cast("Callable[[DeviceMesh, int], TokenSwitch]", self.token_switch)
            switch = make(ep_mesh, num_experts)
            if not isinstance(switch, TokenSwitch):
                raise TypeError(
                    "ExpertParallel: token_switch must return a TokenSwitch, got "
                    f"{type(switch).__name__}"
                )
        ranks, wanted = getattr(switch, "ranks", None), ep_mesh.mesh.flatten().tolist()
        if ranks is not None and ranks != wanted:
            raise ValueError(
                "ExpertParallel: the token switch must have its experts on the ranks of "
                f"the mesh, in order: the mesh has {wanted}, {type(switch).__name__} has "
                f"{ranks}"
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
        """Role of each mesh dim: "ep", "tp" or "replicate"."""
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
        if device_mesh.get_coordinate() is None:
            raise ValueError(
                "ExpertParallel: device_mesh must have the rank that calls it, got ranks "
                f"{device_mesh.mesh.tolist()} on rank {device_mesh.get_rank()}"
            )
        adapter = self._find_adapter(module)
        roles = self._roles(device_mesh)
        dims = trained_parameters(module, adapter.expert_parameters(module), roles)
        num_experts = self._check(module, adapter, dims, roles, device_mesh)
        placed, slots = None, num_experts
        if self.placement is not None:
            if device_mesh.ndim != 1:
                raise ValueError(
                    "ExpertParallel: placement needs a 1-D device_mesh, got a "
                    f"{device_mesh.ndim}-D one"
                )
            placed = self.placement.make_layer(num_experts, device_mesh.get_group())
            slots = placed.home.slot_experts.numel()
        names = device_mesh.mesh_dim_names or ()
        mesh_of = {
            role: device_mesh if device_mesh.ndim == 1 else device_mesh[names[i]]
            for i, role in enumerate(roles)
        }
        region = _Region(
            adapter,
            self._make_switch(mesh_of["ep"], slots),
            self.schedule,
            mesh_of.get("tp"),
            mesh_of["ep"],
            {
                name: _unbound_method(module, name)
                for name in ("forward", adapter.method)
            },
        )
        region.placed = placed
        if self.placement is not None and hasattr(region.switch, "_must_agree"):
            cast(Any, region.switch).settings = self.placement.settings
        name_owner = getattr(region.switch, "name_owner", None)
        if name_owner is not None:
            count = _layers.setdefault(mesh_of["ep"].get_group(), itertools.count())
            number, kind = next(count), type(module).__name__
            name_owner(f"expert parallel layer {number} ({kind})", number + 1)
        region.expert_names = tuple(dims)
        region.make_switch = self._make_switch
        region.mesh_device_type = device_mesh.device_type
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
        if placed is not None:
            placed.owner.layers.append(placed)  # nothing below raises
        module.__dict__["_expert_parallel"] = region  # an attribute of unknown type
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
        """Number of experts; raises if ``module`` can't be spread over ``mesh``."""
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
        counts = {shape[:1] for shape in shapes.values()}
        if len(counts) != 1 or () in counts:
            raise ValueError(
                "ExpertParallel: expert parameters must have the experts on dim 0, got "
                f"shapes {shapes}"
            )
        (num_experts,) = counts.pop()
        ep_size = mesh.size(roles.index("ep"))
        if num_experts % ep_size:
            more = -num_experts % ep_size
            ranks = [n for n in range(1, ep_size) if num_experts % n == 0]
            # Not 0, where there are fewer experts than ranks.
            fewer = (
                f"{num_experts + more - ep_size} or " if num_experts > ep_size else ""
            )
            raise ValueError(
                f"ExpertParallel: the number of experts must be a multiple of the {ep_size} "
                f"ranks of device_mesh, got {num_experts} experts in "
                f"{type(module).__name__}. {fewer}{num_experts + more} are possible: pad every "
                f"expert parameter with {more} experts of zeros, and the router so that nothing "
                f"chooses them. These experts go on {ranks} ranks"
            )
        names = adapter.expert_parameters(module)
        check_parametrizations(module, names, num_experts // ep_size)
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
        distributed = _distributed.get(param)
        if distributed is None:
            distributed = distribute_tensor(
                param, mesh, placements, src_data_rank=self.src_data_rank
            )
            distributed = nn.Parameter(distributed, requires_grad=param.requires_grad)
            _distributed[param] = distributed
            if param.requires_grad:
                # No module has it any more, or only one that it was tied with.
                param.register_hook(functools.partial(_untied, name))
        elif (distributed.device_mesh, distributed.placements) != (mesh, placements):
            raise ValueError(
                f"ExpertParallel: parameter {name!r} is tied to one that is distributed as "
                f"{distributed.placements} on {distributed.device_mesh}; {placements} on "
                f"{mesh} would untie them"
            )
        module.get_submodule(owner).register_parameter(leaf, distributed)

    def __repr__(self) -> str:
        options = {"token_switch": self.token_switch}
        if self.token_switch in ("all_to_all", "hierarchical"):
            options |= self.switch_options
        return f"ExpertParallel({', '.join(f'{k}={v!r}' for k, v in options.items())})"


def _node_mesh(ep_mesh: DeviceMesh, per_node: int) -> DeviceMesh:
    """(node, local) mesh of the ranks of ``ep_mesh``; all layers share its groups."""
    if local_tensor_mode() is not None:
        raise NotImplementedError(
            "ExpertParallel: token_switch='hierarchical' makes groups that differ by rank, which "
            "LocalTensorMode can't; pass a function that returns a TokenSwitchHierarchical of a "
            "2-d mesh"
        )
    group, ranks = ep_mesh.get_group(), ep_mesh.mesh.view(-1, per_node)
    node, local = divmod(ep_mesh.get_local_rank(), per_node)
    groups = [
        c10d._resolve_process_group(sub_group(group, members.tolist()))
        for members in (ranks[:, local], ranks[node])
    ]
    return DeviceMesh.from_group(
        groups, ep_mesh.device_type, mesh=ranks, mesh_dim_names=("node", "local")
    )


# DTensors that parallelize_module made of parameters, for other modules with the same parameter.
_distributed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _untied(name: str, grad: Tensor) -> None:
    raise RuntimeError(
        f"ExpertParallel: parameter {name!r} is tied to one that is not expert parallel and got a "
        "gradient of its own, which would untie them; parallelize every module that has it, on "
        "one mesh"
    )


def _placements(role: str, hidden_dim: int | None) -> tuple[Placement, Placement]:
    """Placements of an expert parameter on a mesh dim, and of its local gradient."""
    if role == "ep":
        return Shard(0), Shard(0)
    if role == "tp" and hidden_dim is not None:
        return Shard(hidden_dim), Shard(hidden_dim)
    return Replicate(), Partial()


def token_switches(model: nn.Module) -> list[TokenSwitch]:
    """Token switches of the expert parallel modules in ``model``, in module order."""
    regions = [getattr(m, "_expert_parallel", None) for m in model.modules()]
    return [region.switch for region in regions if region is not None]


def _is_static(switch: TokenSwitch) -> bool:
    return isinstance(switch, TokenSwitchAllToAll) and switch.capacity is not None


def _static_switches(model: nn.Module) -> list[TokenSwitchAllToAll]:
    switches = filter(_is_static, token_switches(model))
    return cast("list[TokenSwitchAllToAll]", list(switches))


def _gradient_groups(model: nn.Module) -> list[ProcessGroup]:
    """Groups of other ranks that share gradients of experts with a capacity."""
    # FSDP adds its dims to the mesh of a parameter, which has them only while it is sharded. All states
    # of FSDP are searched, as that of a parameter may be of a module around ``model``.
    sharded: dict[int, nn.Parameter] = {}
    for state in list(_module_state_mapping.values()):
        for param_group in getattr(state(), "_fsdp_param_groups", ()):
            for param in param_group.fsdp_params:
                if hasattr(param, "_unsharded_param"):
                    sharded[id(param._unsharded_param)] = param.sharded_param
    groups: dict[str, ProcessGroup] = {}
    for module in model.modules():
        region = getattr(module, "_expert_parallel", None)
        if region is None or not _is_static(region.switch):
            continue
        value = _value(module, region.expert_names[0])
        mesh = cast(DTensor, sharded.get(id(value), value)).device_mesh
        if mesh.ndim > 1:
            ep_name = region.ep_mesh.get_group().group_name
            of_mesh = {group.group_name: group for group in mesh.get_all_groups()}
            groups |= {k: group for k, group in of_mesh.items() if k != ep_name}
    return list(groups.values())
