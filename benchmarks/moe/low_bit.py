"""Decode and prefill on the CPU with expert weights of 8 and 4 bits, next to bfloat16 and to peers.

::

    python benchmarks/moe/low_bit.py --out benchmarks/moe/results/low_bit.json

One row per shape, number of tokens and format. In each, our bfloat16 kernel, the format in the
layout of a checkpoint and in panels (``swizzle_w=[2]``), MXFP4 also with rows in int8, and a loop
over the chosen experts with each op of PyTorch for such weights. All take turns in every round;
the routing is another one in every round, so that weights come from memory. Times are CPU time of
one thread: what others do on the machine costs both sides of a ratio alike, and not much.
_weight_int4pack_mm and _dyn_quant_matmul_4bit read weights that were packed before, like panels;
_weight_int8pack_mm reads those of a checkpoint. Where torchao is installed, its weight-only tensors
are peers too: Int8Tensor, and Int4OpaqueTensor, which calls _weight_int4pack_mm; 0.18.0 has no others
that run on a CPU (its wheel registers da8w4_linear_cpu and float8_linear_cpu without kernels, other
int4 tensors ask for mslk or a GPU), and quantises layers of experts for training on CUDA only.

``stream_share`` is the bytes of the chosen experts' weights over the time, over the rate at which
one thread sums a large tensor in the same round. ``experts`` is how many a call reads: the
median; K * T / experts rows each.
"""

import importlib.metadata
import importlib.util
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping

from report import make_parser, progress, show

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils._moe_low_bit import pack_panels
from torch.testing._internal.moe_low_bit import low_bit_format, LowBitFormat

from measure import (
    affordable_rounds,
    interleaved_seconds,
    provenance,
    ratio_record,
    spread,
    write_json,
)


MX = F.ScalingType.BlockWise1x32.value
# (D, F, E, K)
SHAPES = {
    "qwen3": (2048, 768, 128, 8),
    "gpt_oss": (2880, 2880, 32, 4),
    "qwen3_part": (2048, 768, 16, 8),  # fewer experts: more rows for each, prefill
}
QUICK = {"quick": (256, 128, 8, 2)}
FORMATS = (
    "fp8_tensorwise",
    "fp8_rowwise",
    "fp8_128x128",
    "mxfp8",
    "int8_rowwise",
    "mxfp4",
    "int4_1x32",
)
STREAM_BYTES = 1 << 28
BF16 = "bfloat16"


def random_bytes(*shape: int) -> Tensor:
    """Drawn eight at a time."""
    count = 1
    for size in shape:
        count *= size
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), 2**63 - 1)
    return words.view(torch.uint8)[:count].view(shape)


def make_weight(fmt: LowBitFormat, E: int, N: int, K: int) -> list[Tensor]:
    """[data, scale] of random finite codes; of LowBitFormat.draw only the scales."""
    per_byte = 2 if fmt.bits < 8 else 1
    data = random_bytes(E, N, K // per_byte)
    if fmt.data is torch.float8_e4m3fn:
        data.bitwise_and_(0xF7)  # no NaN
    small = fmt.draw(1, 128, 128).scale
    scaling = F.ScalingType
    shape = {
        scaling.TensorWise: (1,),
        scaling.RowWise: (E, N, 1),
        scaling.BlockWise1x32: (E, N, K // 32),
        scaling.BlockWise128x128: (E, -(-N // 128), -(-K // 128)),
    }[fmt.scaling]
    as_bytes = small.view(torch.uint8) if small.itemsize == 1 else small
    scale = as_bytes.flatten()[0].expand(shape).contiguous().view(small.dtype)
    return [data.view(fmt.data), scale]


class Routing:
    """One call's rows, and the experts that it reads."""

    def __init__(self, T: int, E: int, K: int):
        self.indices = torch.rand(T, E).topk(K).indices
        self.weights = torch.rand(T, K)
        row_slots, slot_rows, offs, counts = torch._moe_permutation(self.indices, E)
        self.rows = (offs, self.weights, row_slots, slot_rows)
        self.experts = counts.nonzero().flatten().tolist()


def run_bf16(x: Tensor, routing: Routing, w_in: Tensor, w_out: Tensor) -> Tensor:
    return torch._moe_mlp(x, w_in, w_out, *routing.rows, compute_preact=False)[0]


def run_scaled(x, routing, fmt, pairs, panels: bool, int8: bool = False) -> Tensor:
    """_moe_mlp_scaled; of int8 rows the rounding of the input counts as well."""
    offs, weights, row_slots, slot_rows = routing.rows
    scaled = list(torch._moe_quantize(x, MX, dtype=torch.int8)) if int8 else []
    return torch._moe_mlp_scaled(
        x, None, None, offs, weights, row_slots, slot_rows, None, None, None,
        scaled, *pairs, [],
        recipe_a=[MX] if int8 else [],
        recipe_w=[fmt.scaling.value],
        swizzle_w=[2] if panels else [],
        compute_preact=False,
    )[0]  # fmt: skip


Linear = Callable[[Tensor, int], Tensor]


def run_loop(x: Tensor, routing: Routing, first: Linear, second: Linear) -> Tensor:
    """What one writes around a linear layer of low-bit weights: a loop over the chosen experts."""
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
    """What _weight_int4pack_mm reads, an expert each."""
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
    pack, mm = (
        torch.ops.aten._dyn_quant_pack_4bit_weight,
        torch.ops.aten._dyn_quant_matmul_4bit,
    )
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
    weights = [
        Int4OpaqueTensor(w, s, [1, 32], shape)
        for w, s in zip(packed, pairs, strict=True)
    ]
    return lambda x, e: F.linear(x, weights[e])


def dequantize_linear(data: Tensor, scale: Tensor) -> Linear:
    """Only rowwise FP8: PyTorch converts the weight of an expert in every call."""
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


class Layer:
    """bfloat16 weights of a shape, shared by its rows, and what a round reads."""

    def __init__(self, name: str, shape: tuple[int, int, int, int]):
        self.name = name
        self.D, self.F, self.E, self.K = D, F_, E, K = shape
        self.w_in = self.draw(E, 2 * F_, D)
        self.w_out = self.draw(E, D, F_)
        self.stream = torch.ones(STREAM_BYTES // 8, dtype=torch.int64)

    @staticmethod
    def draw(*shape: int) -> Tensor:
        """Of any sign and mantissa, with one exponent."""
        words = random_bytes(*shape[:-1], 2 * shape[-1]).view(torch.int16)
        return words.bitwise_and_(-0x7F81).bitwise_or_(0x3C00).view(torch.bfloat16)

    def numbers(self, experts: int) -> int:
        return experts * 3 * self.F * self.D


def forms_of(
    layer: Layer, fmt: LowBitFormat
) -> dict[str, Callable[[Tensor, Routing], Tensor]]:
    pairs = [
        make_weight(fmt, layer.E, 2 * layer.F, layer.D),
        make_weight(fmt, layer.E, layer.D, layer.F),
    ]
    panels = [list(pack_panels(*pair)) for pair in pairs]
    forms = {
        BF16: lambda x, r: run_bf16(x, r, layer.w_in, layer.w_out),
        "checkpoint": lambda x, r: run_scaled(x, r, fmt, pairs, False),
        "panels": lambda x, r: run_scaled(x, r, fmt, panels, True),
    }
    if fmt.name == "mxfp4":
        forms["checkpoint, int8 rows"] = lambda x, r: run_scaled(
            x, r, fmt, pairs, False, True
        )
        forms["panels, int8 rows"] = lambda x, r: run_scaled(
            x, r, fmt, panels, True, True
        )
    for name, make in PEERS.get(fmt.name, {}).items():
        first, second = (make(*pair) for pair in pairs)
        forms[name] = lambda x, r, a=first, b=second: run_loop(x, r, a, b)
    return forms


def check(outputs: Mapping[str, Tensor], fmt: LowBitFormat) -> None:
    """Both layouts have the same bits; what a peer computes is the same layer."""
    ours = outputs["checkpoint"]
    if not torch.equal(ours, outputs["panels"]):
        raise AssertionError(f"{fmt.name}: the two layouts differ")
    for name, y in outputs.items():
        if name in (BF16, "panels"):
            continue
        noise = (
            y.double() - ours.double()
        ).square().sum() / ours.double().square().sum()
        if not noise < 1e-3:
            raise AssertionError(f"{fmt.name}: {name} is another layer: {noise:.1e}")


def measure(
    layer: Layer, fmt: LowBitFormat, forms, T: int, budget: float
) -> dict[str, object]:
    state: dict[str, object] = {}
    experts = []

    def next_round(_: int) -> None:
        state["routing"] = Routing(T, layer.E, layer.K)
        state["x"] = torch.randn(T, layer.D).bfloat16()
        experts.append(len(state["routing"].experts))

    next_round(0)
    outputs = {name: form(state["x"], state["routing"]) for name, form in forms.items()}
    check(outputs, fmt)
    calls = {
        name: lambda form=form: form(state["x"], state["routing"])
        for name, form in forms.items()
    }
    calls["stream"] = layer.stream.sum
    start = time.perf_counter()
    for call in calls.values():
        call()
    rounds = affordable_rounds(60, time.perf_counter() - start, budget)
    seconds = interleaved_seconds(
        calls, rounds=rounds, warmup=2, on_round=next_round, clock=time.thread_time
    )
    count = statistics.median(experts)
    rate = STREAM_BYTES / statistics.median(seconds["stream"])
    row: dict[str, object] = {
        "id": f"{layer.name}/{T}/{fmt.name}",
        "format": fmt.name,
        "T": T, "D": layer.D, "F": layer.F, "E": layer.E, "K": layer.K,
        "experts": count,
        "rows_per_expert": round(T * layer.K / count, 2),
        "stream_gb_per_s": 1e-9 * rate,
        "rounds": rounds,
        "forms": {},
    }  # fmt: skip
    for name in forms:
        bits = 16 if name == BF16 else fmt.bits
        of_stream = layer.numbers(1) * bits / 8 * count / rate
        row["forms"][name] = {
            "milliseconds": spread(1e3 * s for s in seconds[name])._asdict(),
            "stream_share": of_stream / statistics.median(seconds[name]),
        }
    for name in list(forms)[1:]:
        form = row["forms"][name]
        if name.startswith(("checkpoint", "panels")):
            form["bf16_over_this"] = ratio_record(seconds[BF16], seconds[name])
            continue
        for ours in ("checkpoint", "panels"):
            form[f"this_over_{ours}"] = ratio_record(seconds[name], seconds[ours])
    return row


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="JSON to write")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, few rounds")
    parser.add_argument(
        "--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES)
    )
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 2, 8, 256])
    parser.add_argument("--budget", type=float, default=6.0, help="seconds of a row")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shapes = QUICK if arguments.quick else {n: SHAPES[n] for n in arguments.shapes}
    tokens = [1, 12] if arguments.quick else arguments.tokens
    rows = []
    versions = {"torchao": importlib.metadata.version("torchao")} if HAS_TORCHAO else {}
    with progress(
        "rows", len(shapes) * len(arguments.formats) * len(tokens)
    ) as advance:
        for name, shape in shapes.items():
            layer = Layer(name, shape)
            for fmt in map(low_bit_format, arguments.formats):
                forms = forms_of(layer, fmt)
                for T in tokens:
                    budget = 0.2 if arguments.quick else arguments.budget
                    rows.append(measure(layer, fmt, forms, T, budget))
                    advance()
                    if arguments.out:
                        write_json(
                            {**provenance(), **versions, "rows": rows}, arguments.out
                        )

    forms = ("checkpoint", "panels", "checkpoint, int8 rows", "panels, int8 rows")
    columns = {form: f"forms.{form}.bf16_over_this" for form in forms}
    show("bfloat16 over low-bit weights", rows, {"row": "id", **columns})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
