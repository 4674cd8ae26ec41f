"""What the matmuls of the MoE ops' CuTe backend should cost on an H100.

Test-only, and no GPU: the model of moe_sass.py, with nothing fitted anew, on the machine code
that moe_cutedsl_compile.py leaves. What differs from Triton's kernels: a warp group of its
own loads, over tiles too, so that no tile waits for its first operands; two blocks of a
cluster share what they both read of the weight; and, where two warp groups take turns
(pingpong), one's epilogue is beside the other's matmuls.

    python moe_cutedsl_compile.py --arch 90 --keep FOLDER ... > rows.jsonl     # and 100, 103
    python moe_cutedsl_model.py --cubins FOLDER --rows *.jsonl \
        --output benchmarks/moe/results/cutedsl_gate.json
"""

import argparse
import json
import pathlib
import re
import sys

from moe_sass import (
    _count,
    _matrix_cost,
    BARRIER,
    CLOCK,
    disassemble,
    DRAM_BYTES,
    Estimate,
    forecast,
    Instruction,
    Kernel,
    L2_PORT,
    LAUNCH_SECONDS,
    layer_microseconds,
    Listing,
    POWER_FLOPS,
    Shape,
    SHAPES,
    SMALL_BACKWARD,
    SMALL_FORWARD,
    SMS,
    work_of,
)

from torch._native.ops.moe.triton_kernels import launch


# SonicMoE on H100 (arXiv 2512.14080, figure 6), at SHAPES[0]: these kernels, or the older ones
# that they grew out of, with the same tiles. Nothing here was fitted on it. That of down is
# derived from 485 TFLOP/s, that of the sum per token from 2.85 TB/s.
SONICMOE_US = {"forward_us": 1240, "backward_us": 2170}
SONICMOE_KERNELS_US = {
    "up": 550,
    "down": 319,
    "combine": 238,
    "act_backward": 470,
    "input_grad": 500,
}
# Kernel of the layer; file, (rows, columns) of its tile as work_of() counts them, pingpong,
# and the same where the contraction is longer than SHORT; flags.
GEMMS = pathlib.Path(launch.__file__).parents[1] / "cutedsl_kernels/gemms.py"
SHORT = int(re.findall(r"^MAX_SHORT = (\d+)$", GEMMS.read_text(), re.MULTILINE)[0])
KERNELS = (
    ("up", ("up_swiglu", (128, 128), False), None, {"STORE_PREACT": True}),
    (
        "down",
        ("down_swiglu", (128, 192), True),
        ("down_long_swiglu", (128, 256), False),
        {"HAS_SCALE": True},
    ),
    ("act_backward", ("act_backward_swiglu_interleaved", (128, 128), True), None, {}),
    (
        "input_grad",
        ("input_grad_swiglu", (128, 192), True),
        ("input_grad_long_swiglu", (128, 256), False),
        {"HAS_SCALE": False},
    ),
    ("dw_in", ("dw_in_swiglu", (128, 256), False), None, {"GATHER_Q": False}),
    ("dw_out", ("dw_out_swiglu", (128, 256), False), None, {"GATHER_Q": False}),
)


def router_microseconds(shape: Shape) -> dict[str, float]:
    """What SonicMoE's benchmark times beside the experts, at the least.

    Its benchmarks/moe-cute.py (commit cbcb12a) times a layer from the router's logits on, and
    its backward as what a step takes longer. Each kernel here is its bytes and its launch: no
    fewer kernels than the operators of that layer need, and a sort of 8 bits a pass.
    """
    T, D, E, R = shape.T, shape.D, shape.E, shape.rows
    forward = (
        2 * (T * D + E * D + T * E),  # logits
        2 * T * E + 8 * R,  # softmax and top-k
        4 * R,  # counts
        *[16 * R] * 4,  # sort of 32-bit keys with 32-bit values
        8 * R,  # the permutation turned around
    )
    backward = (
        2 * T * E,  # zeros of the logits' gradient
        10 * R,  # softmax and top-k
        2 * (T * D + E * D + T * E),  # weight of the router
        2 * (2 * T * D + E * D + T * E),  # input, added to that of the experts
    )

    def microseconds(kernels: tuple[int, ...]) -> float:
        return sum(1e6 * (size / DRAM_BYTES + LAUNCH_SECONDS) for size in kernels)

    return {"forward_us": microseconds(forward), "backward_us": microseconds(backward)}


def consumer(listing: Listing) -> tuple[list[Instruction], list[Instruction]]:
    """The matmul loop, and the rest of the smallest loop over tiles around it."""
    code = listing.instructions
    spans = [(a, b) for a, b in listing.loops() if _count(code[a : b + 1], "HGMMA") > 0]
    first, last = spans[0]
    begin, end = next((a, b) for a, b in spans[1:] if a < first and b > last)
    return list(code[first : last + 1]), [*code[begin:first], *code[last + 1 : end + 1]]


def estimate(kernel: Kernel, shape: Shape, pingpong: bool) -> Estimate:
    """Time of a kernel of KERNELS for ``shape``, in the terms of moe_sass.estimate()."""
    loop, outside = consumer(kernel.listing)
    work, (bm, _, bk) = work_of(kernel, shape), kernel.block
    groups = 1 if pingpong else 2
    flops, operand_bytes = (groups * x for x in _matrix_cost(loop))
    columns = work.step_bytes - bm * bk * 2
    tiles = work.tiles
    if not kernel.name.startswith("dw"):
        # A cluster takes two row tiles of an expert, the last of which may be empty.
        tiles *= 2 * shape.row_tiles(2 * bm) / shape.row_tiles(bm)
    costs = {
        "tensor cores": flops / 4096,
        "shared memory": (operand_bytes + work.step_bytes) / 128,
        "L2": (bm * bk * 2 + columns / 2) / L2_PORT,
        "latency": sum(ins.stall for ins in loop) + BARRIER * _count(loop, "BAR.SYNC"),
    }
    matmuls = work.steps * max(costs.values())
    issue = (len(outside) + 3 * _count(outside, "MUFU")) * groups
    stalls = sum(ins.stall for ins in outside) + BARRIER * _count(outside, "BAR.SYNC")
    epilogue = max(issue, stalls)
    per_tile = (
        max(matmuls, (matmuls + epilogue) / 2) if pingpong else matmuls + epilogue
    )
    limiter = f"loop ({max(costs, key=costs.__getitem__)})"
    if per_tile - matmuls > matmuls / 2:
        limiter = "epilogue"
    times = {
        limiter: -(-tiles // SMS) * per_tile / CLOCK,
        "DRAM": work.dram_bytes / DRAM_BYTES,
        "power": tiles * work.steps * flops / POWER_FLOPS,
    }
    seconds = sum(t**4 for t in times.values()) ** 0.25 + LAUNCH_SECONDS
    of_dense = work.flops / seconds / POWER_FLOPS
    cycles = -(-tiles // SMS) / CLOCK
    parts = {
        "at the dense rate": 1e6 * work.flops / POWER_FLOPS,
        "loop": 1e6 * matmuls * cycles,
        "epilogue": 1e6 * (per_tile - matmuls) * cycles,
        "DRAM": 1e6 * times["DRAM"],
        "padding": tiles * work.steps * flops / work.flops,
    }
    limiter = max(times, key=times.__getitem__)
    return Estimate(1e6 * seconds, of_dense, limiter, parts)


def estimates(folder: pathlib.Path, shape: Shape) -> dict[str, Estimate]:
    """By kernel of the layer."""
    found = {}
    for name, *variants, flags in KERNELS:
        terms = {"down": shape.F, "input_grad": 2 * shape.F}.get(name, 0)
        file, (bm, bn), pingpong = variants[terms > SHORT]
        cubin = (folder / f"{file}_bfloat16_90.cubin").read_bytes()
        constants = {"BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": 64, **flags}
        # Read by work_of(); what depends on the parts of an epilogue is not used by estimate().
        constants |= {"TWO_WEIGHTS": False, "EPILOGUE_PARTS": 1}
        kernel = Kernel(name, "sm_90", constants, 12, 168, 0, 0, disassemble(cubin))
        found[name] = estimate(kernel, shape, pingpong)
    return found


def sonicmoe(times: dict[str, float]) -> list[dict[str, object]]:
    """Rows as of CALIBRATION, of the kernels' ``times`` at SHAPES[0]."""
    shape = SHAPES[0]
    combine = layer_microseconds(shape, dict.fromkeys(times, 0.0))["backward_us"]
    predicted = {"combine": combine - sum(SMALL_BACKWARD.values())}
    layer, router = layer_microseconds(shape, times), router_microseconds(shape)
    small = {"forward_us": SMALL_FORWARD, "backward_us": SMALL_BACKWARD}
    rows = []
    for name, published in (SONICMOE_US | SONICMOE_KERNELS_US).items():
        if name in layer:
            us = layer[name] - sum(small[name].values()) + router[name]
        else:
            us = {**times, **predicted}[name]
        rows.append(
            {
                "kernel": f"SonicMoE {name.removesuffix('_us')}",
                "predicted_us": round(us),
                "published_us": published,
                "ratio": round(published / us, 2),
            }
        )
    return rows


def record(
    folder: pathlib.Path, rows: list[pathlib.Path], output: pathlib.Path
) -> None:
    """Writes the compiled kernels and their modelled times."""
    kernels = [json.loads(line) for path in rows for line in path.open()]
    times, layers = [], []
    for shape in SHAPES:
        found = estimates(folder, shape)
        us = {name: round(cost.us, 1) for name, cost in found.items()}
        for name, cost in found.items():
            times.append(
                {
                    "shape": shape.name,
                    "kernel": name,
                    "us": us[name],
                    "of_dense": round(cost.of_dense, 3),
                    "limiter": cost.limiter,
                    "explained": cost.explained,
                }
            )
        layers.append({"name": shape.name, **forecast(shape, us)})
        print(layers[-1])
        if shape is SHAPES[0]:
            calibration = sonicmoe(us)
    tables = {
        "kernels": kernels,
        "estimates": times,
        "layers": layers,
        "calibration": calibration,
    }
    head = {
        "command": "python test/python_native/moe_cutedsl_model.py --cubins FOLDER "
        "--rows 90.jsonl 100.jsonl 103.jsonl --output FILE",
        "packages": "tools/cutedsl-requirements.txt",
    }
    text = ",\n ".join(f'"{k}": {json.dumps(v)}' for k, v in head.items())
    for name, table in tables.items():
        text += f',\n "{name}": [\n  ' + ",\n  ".join(map(json.dumps, table)) + "\n ]"
    output.write_text("{\n " + text + "\n}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cubins", type=pathlib.Path, required=True)
    parser.add_argument("--rows", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    options = parser.parse_args()
    sys.exit(record(options.cubins, options.rows, options.output))
