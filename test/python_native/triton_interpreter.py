"""Triton's interpreter with exact low-precision floats, a memory sanitizer for it, and
programs in any order.

Test-only. It lets a machine without a GPU check what a Triton kernel computes and
which memory it touches. The environment variable TRITON_INTERPRET=1 has to be set
before Triton is imported; :func:`require_interpreter` says so when it was not.

Why a patch is needed: the interpreter stores bfloat16 and float8 as raw bits in
numpy integers, and silently computes on those bits (``tl.dot``, ``+``, ``<``), or
truncates where the hardware rounds to nearest (casts). Seen with Triton 3.6, 3.7
and 3.9; upstream declined to support it (triton-lang/triton #11584).
:func:`exact_floats` routes these types through torch, which rounds correctly.

What the interpreter cannot show: anything about speed, and races within a program.
"""

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np

import torch


def require_interpreter() -> None:
    """Raises unless Triton runs its kernels in the interpreter in this process."""
    import triton

    if not triton.knobs.runtime.interpret:
        raise RuntimeError(
            "these tests need TRITON_INTERPRET=1 from before Triton is imported, and "
            "an interpreted and a compiled Triton cannot share a process: run this "
            "file in a process of its own "
            f"(TRITON_INTERPRET is {os.environ.get('TRITON_INTERPRET')!r})"
        )


class _ExactFloats:
    """Replacements for the methods of ``InterpreterBuilder`` that misread raw floats."""

    def __init__(self) -> None:
        import triton.language as tl
        from triton.runtime import interpreter

        self.tl = tl
        self.handle = interpreter.TensorHandle
        self.np_dtype = interpreter._get_np_dtype
        self.builder = interpreter.InterpreterBuilder
        self.nearest = interpreter._ir.ROUNDING_MODE.RTNE
        # Kept by the interpreter as integers of the same width.
        self.raw = {
            tl.bfloat16: (torch.bfloat16, torch.uint16),
            tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
            tl.float8e5: (torch.float8_e5m2, torch.uint8),
        }
        self.floats = {
            tl.float16: torch.float16,
            tl.float32: torch.float32,
            tl.float64: torch.float64,
        }
        self.original = {
            name: getattr(self.builder, name)
            for name in (
                "cast_impl",
                "create_fp_to_fp",
                "binary_op",
                "unary_op",
                "create_dot",
            )
        }

    def convert(self, data: np.ndarray, src, dst) -> np.ndarray:
        """``data`` of Triton type ``src`` as ``dst``, rounded to nearest even."""
        t = torch.from_numpy(np.ascontiguousarray(data)).reshape(np.shape(data))
        if src in self.raw:
            t = t.view(self.raw[src][0])
        if dst in self.raw:
            value, storage = self.raw[dst]
            return t.to(value).view(storage).numpy()
        return t.to(self.floats[dst]).numpy()

    def _is_float(self, ty) -> bool:
        return ty in self.raw or ty in self.floats

    def cast(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source not in self.raw and target not in self.raw:
            return None
        if self._is_float(source) and self._is_float(target):
            return self.handle(self.convert(src.data, source, target), target)
        fp32 = self.tl.float32
        if source in self.raw:
            data = self.convert(src.data, source, fp32).astype(self.np_dtype(dst_type))
        else:
            data = self.convert(src.data.astype(np.float32), fp32, target)
        return self.handle(data, target)

    def elementwise(self, args, op):
        """``op`` in float32, rounded once; comparisons give booleans as they are."""
        ty = args[0].dtype.scalar
        out = op(*(self.convert(arg.data, ty, self.tl.float32) for arg in args))
        if out.dtype == np.bool_:
            return self.handle(out, self.tl.int1)
        return self.handle(self.convert(out, self.tl.float32, ty), ty)

    def dot(self, a, b, d):
        # In float64, because a BLAS may give a row other bits in another place,
        # which a matrix instruction does not.
        def wide(x):
            ty = x.dtype.scalar
            data = (
                self.convert(x.data, ty, self.tl.float32) if ty in self.raw else x.data
            )
            return data.astype(np.float64)

        product = np.matmul(wide(a), wide(b)).astype(d.data.dtype)
        return self.handle(product + d.data, d.dtype.scalar)


@contextlib.contextmanager
def exact_floats() -> Iterator[None]:
    """bfloat16 and float8 in the interpreter compute and round as hardware does."""
    require_interpreter()
    exact = _ExactFloats()
    original = exact.original
    bitwise = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)

    def cast_impl(self, src, dst_type):
        out = exact.cast(src, dst_type)
        return original["cast_impl"](self, src, dst_type) if out is None else out

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        out = None
        if rounding_mode in (None, exact.nearest):
            out = exact.cast(src, dst_type)
        if out is None:
            out = original["create_fp_to_fp"](self, src, dst_type, rounding_mode)
        return out

    def binary_op(self, lhs, rhs, op):
        if lhs.dtype.scalar in exact.raw and op not in bitwise:
            return exact.elementwise((lhs, rhs), op)
        return original["binary_op"](self, lhs, rhs, op)

    def unary_op(self, arg, op):
        if arg.dtype.scalar in exact.raw:
            return exact.elementwise((arg,), op)
        return original["unary_op"](self, arg, op)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if np.issubdtype(d.data.dtype, np.floating):
            return exact.dot(a, b, d)
        return original["create_dot"](
            self, a, b, d, input_precision, max_num_imprecise_acc
        )

    patches = (cast_impl, create_fp_to_fp, binary_op, unary_op, create_dot)
    for patch in patches:
        setattr(exact.builder, patch.__name__, patch)
    try:
        yield
    finally:
        for name, method in original.items():
            setattr(exact.builder, name, method)


@contextlib.contextmanager
def shuffled_programs(seed: int) -> Iterator[None]:
    """The programs of every grid run in an order drawn from ``seed``.

    The interpreter runs them one after another, in the order of their ids. A kernel whose
    result depends on that order (a program that reads what another one writes, a sum by
    atomics) shows as other bits; a GPU promises no order.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx
    draw = random.Random(seed)
    order: list[int] = []

    def shuffled_dim(self, nx, ny, nz):
        order[:] = range(nx * ny * nz)
        draw.shuffle(order)
        set_dim(self, nx, ny, nz)

    def shuffled_idx(self, x, y, z):
        nx, ny, nz = self.grid_dim
        place = order[(x * ny + y) * nz + z]
        set_idx(self, place // (ny * nz), place // nz % ny, place % nz)

    builder.set_grid_dim, builder.set_grid_idx = shuffled_dim, shuffled_idx
    try:
        yield
    finally:
        builder.set_grid_dim, builder.set_grid_idx = set_dim, set_idx


class MemorySanitizer:
    """Checks every load and store of the kernels that run inside its context.

    Errors (``triton.runtime.errors.InterpreterError`` wraps them):
        IndexError: an unmasked lane lies outside every tensor argument.
        RuntimeError: two programs store to one address, or one store instruction
            has two lanes that store to one address.

    Attributes:
        num_accesses: loads and stores checked so far, so that a test can see that
            the sanitizer was there.
    """

    def __init__(self) -> None:
        self.num_accesses = 0
        self._ranges: list[tuple[int, int]] = []
        self._writer: dict[int, tuple[int, ...]] = {}

    def _add_range(self, arg: object) -> None:
        if isinstance(arg, tuple):
            for item in arg:
                self._add_range(item)
        elif hasattr(arg, "block_shape"):
            self._add_range(arg.base)
        elif isinstance(arg, torch.Tensor) and arg.numel() > 0:
            extent = 1 + sum((n - 1) * s for n, s in zip(arg.shape, arg.stride()))
            first = arg.data_ptr()
            self._ranges.append((first, first + extent * arg.element_size()))

    def _check(self, ptrs, mask, what: str, program) -> np.ndarray:
        addresses, active = np.broadcast_arrays(ptrs.data, mask.data)
        addresses = addresses[active.astype(bool)]
        size = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
        inside = np.zeros(addresses.shape, dtype=bool)
        for first, end in self._ranges:
            inside |= (addresses >= first) & (addresses + size <= end)
        self.num_accesses += 1
        if not inside.all():
            raise IndexError(
                f"{what} out of bounds in program {program}: "
                f"{int((~inside).sum())} of {inside.size} lanes"
            )
        return addresses

    def _record_stores(self, addresses: np.ndarray, program) -> None:
        if len(np.unique(addresses)) != addresses.size:
            raise RuntimeError(f"two lanes of program {program} store to one address")
        for address in addresses.tolist():
            owner = self._writer.setdefault(address, program)
            if owner != program:
                raise RuntimeError(
                    f"programs {owner} and {program} store to one address"
                )

    @contextlib.contextmanager
    def __call__(self) -> Iterator["MemorySanitizer"]:
        from triton.runtime import interpreter

        executor = interpreter.GridExecutor
        builder = interpreter.InterpreterBuilder
        init_args = executor._init_args_hst
        masked_load = builder.create_masked_load
        masked_store = builder.create_masked_store

        def sanitized_init(this, args, kwargs):
            host_args, host_kwargs = init_args(this, args, kwargs)
            self._ranges.clear()
            self._writer.clear()
            for arg in (*host_args, *host_kwargs.values()):
                self._add_range(arg)
            return host_args, host_kwargs

        def sanitized_load(this, ptrs, mask, *args, **kwargs):
            self._check(ptrs, mask, "load", this.grid_idx)
            return masked_load(this, ptrs, mask, *args, **kwargs)

        def sanitized_store(this, ptrs, value, mask, *args, **kwargs):
            addresses = self._check(ptrs, mask, "store", this.grid_idx)
            self._record_stores(addresses, this.grid_idx)
            return masked_store(this, ptrs, value, mask, *args, **kwargs)

        executor._init_args_hst = sanitized_init
        builder.create_masked_load = sanitized_load
        builder.create_masked_store = sanitized_store
        try:
            yield self
        finally:
            executor._init_args_hst = init_args
            builder.create_masked_load = masked_load
            builder.create_masked_store = masked_store
