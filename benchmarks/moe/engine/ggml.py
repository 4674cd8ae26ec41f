"""The experts of llama.cpp on tensors of PyTorch, through the C interface of ggml, for worker.py.

The graph is that of llama.cpp: ``ggml_mul_mat_id`` of gate and up together, ``ggml_swiglu``, the second
product, and a sum over the experts of a token. Rows are float32, as there, and ggml rounds them to the
type that it multiplies a format with.
"""

import ctypes
import functools
import itertools
import mmap
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from llama_cpp._ggml import libggml

import torch
from torch import Tensor


# enum ggml_type
F32, I32 = 0, 26
TYPES = {"bfloat16": 30, "int8_rowwise": 8, "int4_1x32": 2, "mxfp4": 39}
NAMES = "w_in", "w_out"


class InitParams(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


def ggml(name: str, *args: Any, returns: type = ctypes.c_void_p) -> Any:
    """Calls ``ggml_<name>``. Integers may be wider than the parameters, which are in registers."""
    function = getattr(libggml, f"ggml_{name}")
    function.restype = returns
    words = (ctypes.c_int64(a) if isinstance(a, int) else a for a in args)
    return function(*words)


def memory(address: int, size: int, dtype: torch.dtype) -> Tensor:
    """A tensor on ``size`` bytes that ggml holds."""
    held = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(held, dtype=dtype)


def blocks(data: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """The bytes of Q8_0, Q4_0 or MXFP4: 32 elements along K behind their scale."""
    data = data.view(torch.uint8)
    E, rows = data.shape[:2]
    if fmt == "int8_rowwise":
        codes = data.view(E, rows, -1, 32)
    else:  # a byte has elements i and i + 16, not i + 1
        codes = torch.stack([data & 15, data >> 4], -1).view(E, rows, -1, 2, 16)
        codes = codes[..., 0, :] | codes[..., 1, :] << 4
    if fmt != "mxfp4":
        scale = scale.half().expand(E, rows, codes.shape[2]).contiguous()
    scale = scale.view(torch.uint8).view(*codes.shape[:-1], -1)
    return torch.cat([scale, codes], -1)


class Experts:
    """A layer of experts with weights in ggml's memory: called with ``(x, ids, weights)``.

    Args:
        w: the tensors of a file, see ``draw_weights()`` in engines.py
        fmt: their format
        top_k: experts of a token
        scatter: touches new memory in scattered pages; None asks for huge pages
    """

    def __init__(
        self,
        w: Mapping[str, Tensor],
        fmt: str,
        top_k: int,
        scatter: Callable[[Tensor], None] | None,
    ) -> None:
        if fmt not in TYPES:
            raise NotImplementedError(f"ggml has no {fmt}")
        self.top_k = top_k
        self.experts, self.D = w["w_out"].shape[:2]
        self.hidden = w["w_in"].shape[1] // 2
        self.backend = ggml("backend_cpu_init")
        weakref.finalize(self, ggml, "backend_free", self.backend)
        ggml("backend_cpu_set_n_threads", self.backend, torch.get_num_threads())
        self.plain = ggml("backend_get_default_buffer_type", self.backend)
        held = self._allocate(TYPES[fmt])
        weakref.finalize(self, ggml, "backend_buffer_free", held)
        self._place(held, scatter)
        for name in NAMES:
            scale = w.get(f"{name}_scale")
            data = w[name] if scale is None else blocks(w[name], scale, fmt)
            data = data.contiguous().view(torch.uint8)
            target = getattr(self, name)
            ggml("backend_tensor_set", target, data.data_ptr(), 0, data.numel())
        self.graph_of = functools.lru_cache(maxsize=1)(self._make_graph)

    def _new_context(self) -> int:
        """A context for tensors and graphs without their data."""
        ctx = ggml("init", InitParams(1 << 20, None, True))
        weakref.finalize(self, ggml, "free", ctx)
        return ctx

    def _allocate(self, kind: int) -> int:
        """Makes the tensors of the weights in the first layout that multiplies them."""
        device = ggml("backend_get_device", self.backend)
        registry = ggml("backend_dev_backend_reg", device)
        name = b"ggml_backend_dev_get_extra_bufts"
        find = ggml("backend_reg_get_proc_address", registry, name)
        prototype = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
        extra = itertools.takewhile(bool, prototype(find)(device))
        for layout in (*extra, self.plain):
            ctx = self._new_context()
            sizes = (self.D, 2 * self.hidden), (self.hidden, self.D)
            self.w_in, self.w_out = (
                ggml("new_tensor_3d", ctx, kind, *size, self.experts) for size in sizes
            )
            held = ggml("backend_alloc_ctx_tensors_from_buft", ctx, layout)
            _, results = self._add_layer(ctx, 1)
            supports = functools.partial(ggml, "backend_dev_supports_op", device)
            if all(supports(op, returns=ctypes.c_bool) for op in results[:2]):
                break
            ggml("backend_buffer_free", held)
        else:
            raise RuntimeError(
                "ggml has no layout in which it multiplies these weights"
            )
        name = ctypes.string_at(ggml("backend_buft_name", layout)).decode()
        self.form = f"mul_mat_id {name}"
        return held

    @staticmethod
    def _place(held: int, scatter: Callable[[Tensor], None] | None) -> None:
        base = ggml("backend_buffer_get_base", held)
        size = ggml("backend_buffer_get_size", held)
        if scatter is not None:
            return scatter(memory(base, size, torch.uint8))
        start = -(-base // mmap.PAGESIZE) * mmap.PAGESIZE
        length = ctypes.c_size_t(base + size - start)
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start), length, mmap.MADV_HUGEPAGE)

    def _add_layer(self, ctx: int, T: int) -> tuple[list[int], list[int]]:
        """Inputs, and results: the two products with experts, and the output."""
        D, K = self.D, self.top_k
        sizes = (F32, D, 1, T), (I32, K, T, 1), (F32, 1, K, T)
        x, ids, scores = inputs = [ggml("new_tensor_3d", ctx, *s) for s in sizes]
        for tensor in inputs:
            ggml("set_input", tensor)
        up = ggml("mul_mat_id", ctx, self.w_in, x, ids)
        down = ggml("mul_mat_id", ctx, self.w_out, ggml("swiglu", ctx, up), ids)
        y = ggml("mul", ctx, down, scores)
        terms = [ggml("view_2d", ctx, y, D, T, 4 * D * K, 4 * D * k) for k in range(K)]
        out = functools.reduce(lambda a, b: ggml("add", ctx, a, b), terms)
        ggml("set_output", out)
        return inputs, [up, down, out]

    def _make_graph(self, T: int) -> tuple:
        ctx = self._new_context()
        inputs, results = self._add_layer(ctx, T)
        graph = ggml("new_graph", ctx)
        ggml("build_forward_expand", graph, results[-1])
        allocator = ggml("gallocr_new", self.plain)
        ggml("gallocr_alloc_graph", allocator, graph)
        weakref.finalize(self, ggml, "gallocr_free", allocator)
        counts = T * self.D, T * self.top_k, T * self.top_k, T * self.D
        dtypes = torch.float, torch.int, torch.float, torch.float
        views = [
            memory(ggml("get_data", tensor), 4 * count, dtype)
            for tensor, count, dtype in zip((*inputs, results[-1]), counts, dtypes)
        ]
        return graph, *views

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        graph, *inputs, out = self.graph_of(len(x))
        for to, given in zip(inputs, (x, ids, weights)):
            to.copy_(given.reshape(-1))
        if ggml("backend_graph_compute", self.backend, graph, returns=ctypes.c_int):
            raise RuntimeError("ggml_backend_graph_compute failed")
        return out.view(x.shape)
