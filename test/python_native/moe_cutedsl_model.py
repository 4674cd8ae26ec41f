"""What the matmuls of the MoE ops' CuTe backend should cost on an H100.

Test-only, and no GPU: the model of moe_sass.py, with nothing fitted anew, on the machine code
that moe_cutedsl_compile.py leaves. What differs from Triton's kernels: a warp group of its
own loads, over tiles too, so that no tile waits for its first operands; two blocks of a
cluster share what they both read of the weight; and, where two warp groups take turns
(pingpong), one's epilogue is beside the other's matmuls.

    python moe_cutedsl_compile.py --arch 90 --keep FOLDER ... > rows.jsonl     # and --arch 100
    python moe_cutedsl_model.py --cubins FOLDER --rows *.jsonl \
        --output benchmarks/moe/results/cutedsl_gate.json
"""

import argparse
import json
import pathlib
import sys

from moe_sass import (
    _count,
    _matrix_cost,
    BARRIER,
    bias,
    CLOCK,
    disassemble,
    DRAM_BYTES,
    Estimate,
    Instruction,
    Kernel,
    L2_PORT,
    LAUNCH_SECONDS,
    layer_microseconds,
    Listing,
    POWER_FLOPS,
    Shape,
    SHAPES,
    SMS,
    work_of,
)


# SonicMoE on H100 (arXiv 2512.14080, figure 6), at SHAPES[0]: these kernels, or the
# older ones that they grew out of. Nothing here was fitted on it.
SONICMOE_US = {"forward_us": 1240, "backward_us": 2170}
# Kernel of the layer, file, (rows, columns) of its tile as work_of() counts them, pingpong.
KERNELS = (
    ("up", "up_swiglu", (128, 128), False, {"STORE_PREACT": True}),
    ("down", "down_swiglu", (128, 192), True, {"HAS_SCALE": True}),
    ("act_backward", "act_backward_swiglu_interleaved", (128, 128), True, {}),
    ("input_grad", "input_grad_swiglu", (128, 256), False, {"HAS_SCALE": False}),
    ("dw_in", "dw_in_swiglu", (128, 256), False, {"GATHER_Q": False}),
    ("dw_out", "dw_out_swiglu", (128, 256), False, {"GATHER_Q": False}),
)


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
    for name, file, (bm, bn), pingpong, flags in KERNELS:
        cubin = (folder / f"{file}_bfloat16_90.cubin").read_bytes()
        constants = {"BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": 64, "TWO_WEIGHTS": False}
        kernel = Kernel(
            name, "sm_90", {**constants, **flags}, 12, 168, 0, 0, disassemble(cubin)
        )
        found[name] = estimate(kernel, shape, pingpong)
    return found


def record(
    folder: pathlib.Path, rows: list[pathlib.Path], output: pathlib.Path
) -> None:
    """Writes the compiled kernels and their modelled times."""
    kernels = [json.loads(line) for path in rows for line in path.open()]
    times, layers = [], []
    for shape in SHAPES:
        found = estimates(folder, shape)
        for name, cost in found.items():
            times.append(
                {
                    "shape": shape.name,
                    "kernel": name,
                    "us": round(cost.us, 1),
                    "of_dense": round(cost.of_dense, 3),
                    "limiter": cost.limiter,
                    "explained": cost.explained,
                }
            )
        layer = layer_microseconds(shape, {k: cost.us for k, cost in found.items()})
        row = {"name": shape.name, **{k: round(us) for k, us in layer.items()}}
        if shape is SHAPES[0]:
            # The bias is of the calibrators of moe_sass.py, which these are not among.
            row["published_us"] = SONICMOE_US
            row["error"] = errors = {}
            row["error_bias_corrected"] = corrected = {}
            for k, us in layer.items():
                errors[k] = round(us / SONICMOE_US[k] - 1, 3)
                corrected[k] = round(bias()[0] * us / SONICMOE_US[k] - 1, 3)
        layers.append(row)
        print(row)
    tables = {"kernels": kernels, "estimates": times, "layers": layers}
    head = {
        "command": "python test/python_native/moe_cutedsl_model.py --cubins FOLDER "
        "--rows 90.jsonl 100.jsonl --output FILE",
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
