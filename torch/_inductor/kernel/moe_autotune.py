"""Tiles of the MoE kernels, chosen by Inductor's autotuner under ``max_autotune``.

Without it the launchers take the first tile of their table that fits. Here each tile that fits is
a choice: the launcher, traced with that tile, compiled and measured as a subgraph. All tiles of a
forward kernel give the same bits (torch/_native/ops/moe/triton_kernels/configs.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TYPE_CHECKING

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.codegen.subgraph import SubgraphTemplate
from torch._inductor.ir import get_free_symbols, TensorBox
from torch._inductor.select_algorithm import autotune_select_algorithm
from torch._inductor.virtualized import V


if TYPE_CHECKING:
    from torch._native.ops.moe.triton_kernels.experts import Experts

# Kernel, columns and length of the contraction; the problems of one op differ in nothing else.
Problem = tuple[str, int, int]


class TileChooser:
    """Replaces the autotuner of a launcher and returns tiles that were chosen before.

    Attributes:
        chosen: tile of each problem; the first that fits where there is none.
        asked: tiles that fit each problem that was launched.
    """

    def __init__(self) -> None:
        self.chosen: dict[Problem, Any] = {}
        self.asked: dict[Problem, tuple[Any, ...]] = {}

    def choose(
        self,
        problem: tuple[Any, ...],
        configs: Sequence[Any],
        launch: Callable[[Any], object],
    ) -> Any:
        """As ``triton_kernels.autotune.Autotuner.choose``; launches nothing."""
        key: Problem = problem[:3]
        self.asked.setdefault(key, tuple(configs))
        return self.chosen.get(key, configs[0])


def _name(tile: Any) -> str:
    return "_".join(str(int(value)) for value in dataclasses.astuple(tile))


def even_routing(
    num_tokens: int, top_k: int, num_rows: int, num_experts: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """offs (E), row_slots (R) and slot_rows (T, K), all int32, of experts with equal loads.

    The autotuner would use zeros: experts without rows, and kernels without work.
    """
    num_slots = num_tokens * top_k
    used = min(num_slots, num_rows)
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(num_slots, generator=generator)[:used]
    row_slots = torch.full((num_rows,), -1)
    row_slots[:used] = slots
    slot_rows = torch.full((num_slots,), -1)
    slot_rows[slots] = torch.arange(used)
    offs = torch.arange(1, num_experts + 1) * used // num_experts
    found = (offs, row_slots, slot_rows.view(num_tokens, top_k))
    offs, row_slots, slot_rows = (x.to(device, torch.int32) for x in found)
    return offs, row_slots, slot_rows


def _input_generators(
    present: Sequence[TensorBox], experts: "Experts"
) -> dict[int, Callable[[Any], Tensor]]:
    """Functions that make benchmark inputs, by position in ``present``, of tensors with the routing."""
    input: Any = experts.input
    offs: Any = experts.offs
    row_slots: Any = experts.row_slots
    slot_rows: Any = experts.slot_rows

    def make(which: int, _: Any) -> Tensor:
        hint = V.graph.sizevars.optimization_hint
        num_tokens, top_k = hint(input.get_size()[0]), 1
        num_rows = num_tokens
        if row_slots is not None and slot_rows is not None:
            top_k = hint(slot_rows.get_size()[1])
            num_rows = hint(row_slots.get_size()[0])
        num_experts = hint(offs.get_size()[0])
        device = offs.get_device()
        return even_routing(num_tokens, top_k, num_rows, num_experts, device)[which]

    return {
        present.index(node): functools.partial(make, which)
        for which, node in enumerate((offs, row_slots, slot_rows))
        if node is not None
    }


def tune(
    name: str,
    chooser: TileChooser,
    stages: Sequence[Callable[..., Tensor]],
    operands: Sequence[TensorBox | None],
    experts: "Experts",
) -> None:
    """Chooses the tiles of all kernels that ``stages`` launch.

    Args:
        name: the key in the autotuner's cache: the op and all that is compiled into its kernels.
        chooser: the one of the plan with which the stages launch.
        stages: functions from the operands to one tensor each. What this tensor does not need is
            not measured.
        operands: realized nodes, or None, which a stage gets as None.
        experts: the description of these nodes, the routing included.
    """
    present = [node for node in operands if node is not None]
    if not (config.max_autotune or config.max_autotune_gemm):
        return
    if any(get_free_symbols(x.get_size(), unbacked_only=True) for x in present):
        # A subgraph cannot take these.
        return
    generators = _input_generators(present, experts)
    for i, stage in enumerate(stages):

        def call(*tensors: Tensor, stage=stage) -> Tensor:
            rest = iter(tensors)
            return stage(*(None if x is None else next(rest) for x in operands))

        for problem in _problems_of(call, chooser, present):
            if problem not in chooser.chosen:
                _tune_problem(
                    f"{name}_{i}", problem, chooser, call, present, generators
                )


def _problems_of(
    call: Callable[..., Tensor], chooser: TileChooser, present: Sequence[TensorBox]
) -> list[Problem]:
    """The problems that ``call`` launches."""
    from torch._inductor.ir import ir_node_to_tensor
    from torch.fx.experimental.proxy_tensor import make_fx

    chooser.asked.clear()
    with V.fake_mode:
        make_fx(call)(*map(ir_node_to_tensor, present))
    return list(chooser.asked)


def _tune_problem(
    name: str,
    problem: Problem,
    chooser: TileChooser,
    call: Callable[..., Tensor],
    present: Sequence[TensorBox],
    generators: dict[int, Callable[[Any], Tensor]],
) -> None:
    tiles = {_name(tile): tile for tile in chooser.asked[problem]}

    def moe(*tensors: Tensor, tile: str) -> Tensor:
        chooser.chosen[problem] = tiles[tile]
        return call(*tensors)

    nodes: list[Any] = list(present)
    label = f"{name}_{'_'.join(map(str, problem))}"
    choices = SubgraphTemplate(name=label).generate_custom_op_choices(
        name=label,
        decompositions=[moe] * len(tiles),
        input_nodes=nodes,
        non_tensor_args=[{"tile": tile} for tile in tiles],
        input_gen_fns=generators,
    )
    # Its node is not used: the op is traced again when all tiles are chosen.
    _, winner = autotune_select_algorithm(
        label,
        choices,
        nodes,
        choices[0].layout,
        input_gen_fns=generators,
    )
    chooser.chosen[problem] = tiles[winner.decomposition_kwargs["tile"]]
