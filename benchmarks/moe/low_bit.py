"""Decode and prefill on the CPU with 8-bit and 4-bit expert weights, next to bfloat16 and peers.

::

    python benchmarks/moe/low_bit.py --out benchmarks/moe/results/low_bit.json

One row per shape, number of tokens and format. It compares our bfloat16 kernel, the format in the
layout of a checkpoint and in panels (``swizzle_w=[2]``), MXFP4 also with rows in int8, and a loop
over the chosen experts with each op of PyTorch for such weights. All take turns in every round.
Each round has another routing, so that weights come from memory. Times are CPU time of
one thread: other jobs on the machine slow both sides of a ratio alike, and little.
_weight_int4pack_mm and _dyn_quant_matmul_4bit read packed weights, like panels;
_weight_int8pack_mm reads those of a checkpoint. If torchao is installed, its weight-only tensors
are peers, too: Int8Tensor, and Int4OpaqueTensor, which calls _weight_int4pack_mm. 0.18.0 has no others
that run on a CPU (its wheel registers da8w4_linear_cpu and float8_linear_cpu without kernels, other
int4 tensors need mslk or a GPU), and quantises layers of experts for training only on CUDA.

``stream_share`` is the rate at which the chosen experts' weights are read, over the rate at which
one thread sums a large tensor in the same round. ``experts`` is the median number of experts that a
call reads, with K * T / experts rows each.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping

from report import parse, progress, show
from shapes import LOW_BIT_SHAPES, make_operands, Operands, Shape

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils._moe_low_bit import pack_panels
from torch.testing._internal.moe_low_bit import low_bit_format, LowBitFormat

import measure


QUICK = Shape("quick", 1, 256, 128, 8, 2)
FORMATS = (
    "fp8_tensorwise", "fp8_rowwise", "fp8_128x128", "mxfp8", "int8_rowwise", "mxfp4",
    "int4_1x32",
)  # fmt: skip
STREAM_BYTES = 1 << 28
BF16 = "bfloat16"
OURS = ("checkpoint", "panels")


def make_weight(fmt: LowBitFormat, E: int, N: int, K: int) -> list[Tensor]:
    """[data, scale] of equal experts, each in its own memory."""

    def of_all(one: Tensor) -> Tensor:
        if one.dim() == 1:  # a scale for all
            return one
        return one.view(torch.uint8).repeat(E, 1, 1).view(one.dtype)

    weight = fmt.draw(1, N, K)
    return [of_all(weight.data), of_all(weight.scale)]


class Routing:
    """One call's rows, and the experts that it reads."""

    def __init__(self, indices: Tensor, weights: Tensor, E: int):
        self.indices, self.weights = indices, weights
        row_slots, slot_rows, offs, self._counts = torch._moe_permutation(indices, E)
        self.rows = (offs, self.weights, row_slots, slot_rows)

    @functools.cached_property
    def experts(self) -> list[int]:
        return self._counts.nonzero().flatten().tolist()


def run_scaled(x, routing, fmt, pairs, panels: bool, int8: bool = False) -> Tensor:
    """_moe_mlp_scaled; with int8 rows its time includes the rounding of the input."""
    offs, weights, row_slots, slot_rows = routing.rows
    recipe = fmt.scaling.value
    scaled = list(torch._moe_quantize(x, recipe, dtype=torch.int8)) if int8 else []
    return torch._moe_mlp_scaled(
        x, None, None, offs, weights, row_slots, slot_rows, None, None, None,
        scaled, *pairs, [], recipe_a=[recipe] if int8 else [], recipe_w=[recipe],
        swizzle_w=[2] if panels else [], compute_preact=False,
    )[0]  # fmt: skip


Linear = Callable[[Tensor, int], Tensor]


def run_loop(x: Tensor, routing: Routing, first: Linear, second: Linear) -> Tensor:
    """A loop over the chosen experts with a low-bit linear layer, as a user would write it."""
    out = torch.zeros_like(x)
    for e in routing.experts:
        tokens, k = (routing.indices == e).nonzero().unbind(1)
        gate, up = first(x[tokens], e).chunk(2, dim=1)
        y = second(F.silu(gate) * up, e)
        out.index_add_(0, tokens, (y * routing.weights[tokens, k, None]).to(x.dtype))
    return out


# ---- peers: a linear layer of every expert from the plain data and scale of a format ----


def int8pack(data: Tensor, scale: Tensor) -> Linear:
    scales = scale.squeeze(2).to(torch.bfloat16)
    return lambda x, e: torch._weight_int8pack_mm(x, data[e], scales[e])


def pack_int4(data: Tensor, scale: Tensor) -> tuple[list[Tensor], Tensor]:
    """The operands of _weight_int4pack_mm for each expert."""
    packed = []
    for codes in data:
        both = torch.stack([codes & 15, codes >> 4], -1).flatten(1).int()
        packed.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(both, 1))
    pairs = torch.stack([scale, torch.zeros_like(scale)], -1).to(torch.bfloat16)
    return packed, pairs.transpose(1, 2).contiguous()  # (E, groups, N, 2)


def int4pack(data: Tensor, scale: Tensor) -> Linear:
    packed, pairs = pack_int4(data, scale)
    mm = torch.ops.aten._weight_int4pack_mm_for_cpu
    return lambda x, e: mm(x, packed[e], 32, pairs[e])


def dyn_quant(data: Tensor, scale: Tensor) -> Linear:
    """Rows are rounded to int8 inside."""
    E, N, half = data.shape
    sizes = (32, 2 * half, N)
    scales = scale.to(torch.bfloat16)
    aten = torch.ops.aten
    pack, mm = aten._dyn_quant_pack_4bit_weight, aten._dyn_quant_matmul_4bit
    packed = [pack(data[e], scales[e], None, *sizes) for e in range(E)]
    return lambda x, e: mm(x.float(), packed[e], *sizes).to(x.dtype)


def torchao_int8(data: Tensor, scale: Tensor) -> Linear:
    from torchao.quantization import Int8Tensor

    weights = [
        Int8Tensor(w, s, [1, w.shape[1]], torch.bfloat16)
        for w, s in zip(data, scale.to(torch.bfloat16), strict=True)
    ]
    return lambda x, e: F.linear(x, weights[e])


def torchao_int4(data: Tensor, scale: Tensor) -> Linear:
    from torchao.prototype.quantization.int4 import Int4OpaqueTensor

    packed, pairs = pack_int4(data, scale)
    N, half = data.shape[1:]
    shape = torch.Size([N, 2 * half])
    both = zip(packed, pairs, strict=True)
    weights = [Int4OpaqueTensor(w, s, [1, 32], shape) for w, s in both]
    return lambda x, e: F.linear(x, weights[e])


def dequantize_linear(data: Tensor, scale: Tensor) -> Linear:
    """Rowwise FP8 only: PyTorch converts the weight of an expert in every call."""
    return lambda x, e: F.linear(x, data[e].to(x.dtype)) * scale[e, :, 0].to(x.dtype)


PEERS: dict[str, dict[str, Callable]] = {
    "fp8_rowwise": {"dequantize and linear": dequantize_linear},
    "int8_rowwise": {"_weight_int8pack_mm": int8pack},
    "int4_1x32": {"_weight_int4pack_mm": int4pack, "_dyn_quant_matmul_4bit": dyn_quant},
}
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
if HAS_TORCHAO:
    PEERS["int8_rowwise"]["torchao Int8Tensor"] = torchao_int8
    PEERS["int4_1x32"]["torchao Int4OpaqueTensor"] = torchao_int4


# ---- measuring ---------------------------------------------------------------------------


def forms_of(layer: Operands, fmt: LowBitFormat) -> dict[str, Callable]:
    weights_16 = (layer.w_in.detach(), layer.w_out.detach())

    def bfloat16(x: Tensor, routing: Routing) -> Tensor:
        args = (*weights_16, *routing.rows)
        return torch._moe_mlp(x, *args, compute_preact=False)[0]

    pairs = [make_weight(fmt, *weight.shape) for weight in weights_16]
    panels = [list(pack_panels(*pair)) for pair in pairs]
    forms = {BF16: bfloat16}
    for rows in ("", ", int8 rows") if fmt.takes_int8_rows else ("",):
        for name, weights in (("checkpoint", pairs), ("panels", panels)):
            options = {"panels": weights is panels, "int8": rows != ""}
            form = functools.partial(run_scaled, fmt=fmt, pairs=weights, **options)
            forms[name + rows] = form
    for name, make in PEERS.get(fmt.name, {}).items():
        first, second = (make(*pair) for pair in pairs)
        forms[name] = lambda x, r, a=first, b=second: run_loop(x, r, a, b)
    return forms


def check(outputs: Mapping[str, Tensor], fmt: LowBitFormat) -> None:
    """Both layouts must have the same bits, and the other forms must compute the same layer.

    Int8 rows with one scale, a power of two, for all of K have a step of up to 2/127 of their
    largest value: noise of 7e-4 (median) to 1.7e-3 (largest) in 300 random layers.
    """
    ours = outputs["checkpoint"]
    if not torch.equal(ours, outputs["panels"]):
        raise AssertionError(f"{fmt.name}: the two layouts differ")
    for name, y in outputs.items():
        if name in (BF16, "panels"):
            continue
        noise = ((y.double() - ours).norm() / ours.double().norm()) ** 2
        if not noise < (4e-3 if name.endswith("int8 rows") else 1e-3):
            raise AssertionError(f"{fmt.name}: {name} is another layer: {noise:.1e}")


def measure_row(shape: Shape, fmt: LowBitFormat, forms: dict, budget: float) -> dict:
    T, D, hidden, E, K = shape.sizes().values()
    args: tuple = ()
    experts = []

    def next_round(_: int) -> None:
        nonlocal args
        routing = Routing(torch.rand(T, E).topk(K).indices, torch.rand(T, K), E)
        args = (torch.randn(T, D).bfloat16(), routing)
        experts.append(len(routing.experts))

    torch.manual_seed(0)  # rounds depend on the time, what is checked must not
    next_round(0)
    check({name: form(*args) for name, form in forms.items()}, fmt)
    calls = {name: lambda form=form: form(*args) for name, form in forms.items()}
    calls["stream"] = torch.ones(STREAM_BYTES // 8, dtype=torch.int64).sum
    start = time.perf_counter()
    for call in calls.values():
        call()
    rounds = measure.affordable_rounds(60, time.perf_counter() - start, budget)
    seconds = measure.interleaved_seconds(
        calls, rounds=rounds, warmup=2, on_round=next_round, clock=time.thread_time
    )
    count = statistics.median(experts)
    rate = STREAM_BYTES / statistics.median(seconds["stream"])
    row: dict[str, object] = {
        "id": f"{shape.name}/{T}/{fmt.name}",
        "format": fmt.name,
        **shape.sizes(),
        "experts": count,
        "rows_per_expert": round(T * K / count, 2),
        "stream_gb_per_s": 1e-9 * rate,
        "rounds": rounds,
        "forms": {},
    }
    for name in forms:
        bits = 16 if name == BF16 else fmt.bits
        of_stream = 3 * hidden * D * bits / 8 * count / rate
        form = row["forms"][name] = {
            "milliseconds": measure.spread(1e3 * s for s in seconds[name])._asdict(),
            "stream_share": of_stream / statistics.median(seconds[name]),
        }
        if name.startswith(OURS):
            form["bf16_over_this"] = measure.ratio_record(seconds[BF16], seconds[name])
        elif name != BF16:
            for ours in OURS:
                ratio = measure.ratio_record(seconds[name], seconds[ours])
                form[f"this_over_{ours}"] = ratio
    return row


def main(argv: list[str] | None = None) -> int:
    table = {shape.name: shape for shape in LOW_BIT_SHAPES}
    options = {"shapes": table, "formats": dict.fromkeys(FORMATS), "quick": False}
    options |= {"tokens": [1, 2, 8, 256], "budget": 6.0}  # seconds of a row
    args = parse(__doc__, argv=argv, **options)
    if args.quick:
        args.tokens, args.budget = [1, 12], 0.2
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shapes = [QUICK] if args.quick else [table[name] for name in args.shapes]
    fields: dict = {"rows": []}
    if HAS_TORCHAO:
        fields["torchao"] = importlib.metadata.version("torchao")
    total = len(shapes) * len(args.formats) * len(args.tokens)
    with progress("rows", total) as advance:
        for shape in shapes:
            layer = make_operands(shape)
            for fmt in map(low_bit_format, args.formats):
                forms = forms_of(layer, fmt)
                for T in args.tokens:
                    row = dataclasses.replace(shape, T=T)
                    fields["rows"].append(measure_row(row, fmt, forms, args.budget))
                    advance()
                    measure.save(args.out, **fields)
    forms = ("checkpoint", "panels", "checkpoint, int8 rows", "panels, int8 rows")
    columns = {form: f"forms.{form}.bf16_over_this" for form in forms}
    show("bfloat16 over low-bit weights", fields["rows"], {"row": "id", **columns})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
