"""Triton's interpreter with exact low-precision floats, a memory sanitizer for it, and
programs in any order.

Test-only. It lets a machine without a GPU check what a Triton kernel computes and
which memory it touches. The environment variable TRITON_INTERPRET=1 has to be set
before Triton is imported; :func:`require_interpreter` says so when it was not.

Why a patch is needed: the interpreter stores bfloat16 and float8 as raw bits in
numpy integers, and silently computes on those bits (``tl.dot``, ``+``, ``<``), or
truncates where the hardware rounds to nearest (casts). Seen with Triton 3.6, 3.7
and 3.9; upstream declined to support it (triton-lang/triton #11584).
:func:`exact_floats` routes these types through torch, which rounds correctly, and lets
casts to float8 saturate as the conversions of NVIDIA's hardware do. Its tl.dot and
tl.dot_scaled sum in float64; what tensor cores lose in a sum of float8 is not modelled.

What the interpreter cannot show: anything about speed, and races within a program.
"""

import contextlib
import dataclasses
import os
import random
import types
from collections.abc import Iterator
from unittest import mock

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
        # Casts saturate at these; NaN has one code.
        self.largest = {tl.float8e4nv: (448.0, 0x7F), tl.float8e5: (57344.0, 0x7F)}
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
                "create_dot_scaled",
            )
            if hasattr(self.builder, name)  # Triton 3.6 has no create_dot_scaled
        }

    def convert(self, data: np.ndarray, src, dst) -> np.ndarray:
        """``data`` of Triton type ``src`` as ``dst``, rounded to nearest even."""
        t = torch.from_numpy(np.ascontiguousarray(data)).reshape(np.shape(data))
        if src in self.raw:
            t = t.view(self.raw[src][0])
        if dst in self.raw:
            value, storage = self.raw[dst]
            if dst not in self.largest:
                return t.to(value).view(storage).numpy()
            largest, nan = self.largest[dst]
            wide = t.to(torch.float32)
            codes = wide.clamp(-largest, largest).to(value).view(storage)
            return codes.masked_fill(wide.isnan(), nan).numpy()
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

    def scaled_operand(self, x, scale, form, k_pack, is_rhs):
        """The float64 numbers of an operand of ``tl.dot_scaled``."""
        from triton.runtime import interpreter

        ty = x.dtype.scalar
        if form == interpreter._ir.ScaleDotElemTypeTY.E2M1:
            packed = -2 if is_rhs == k_pack else -1
            value = interpreter._unpack_e2m1(x.data, packed).astype(np.float64)
        else:
            value = self.convert(x.data, ty, self.tl.float32).astype(np.float64)
        if scale is None:
            return value
        if scale.dtype.scalar in self.raw:
            factor = self.convert(scale.data, scale.dtype.scalar, self.tl.float32)
        else:
            byte = scale.data.view(np.uint8)
            factor = np.where(
                byte == 255, np.nan, np.exp2(byte.astype(np.float64) - 127)
            )
        # The scales of either operand are (outer, K / block).
        k = value.shape[-2 if is_rhs else -1]
        factor = np.repeat(factor, k // factor.shape[-1], axis=-1)
        return value * (np.swapaxes(factor, -1, -2) if is_rhs else factor)

    def dot_scaled(self, a, a_scale, a_form, b, b_scale, b_form, a_pack, b_pack, d):
        left = self.scaled_operand(a, a_scale, a_form, a_pack, is_rhs=False)
        right = self.scaled_operand(b, b_scale, b_form, b_pack, is_rhs=True)
        product = np.matmul(left, right).astype(d.data.dtype)
        return self.handle(product + d.data, d.dtype.scalar)


@contextlib.contextmanager
def _less_bookkeeping() -> Iterator[None]:
    """Without half of the interpreter's time.

    Every call of a function that a kernel calls patches triton.language again, in case it knows
    more of its modules: a launch patches all of them. And every sum and product of integers is
    made a second time in int64, to see an overflow, which here is an address out of bounds.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    modules = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    patch_lang = interpreter._patch_lang

    def call(self, *args, **kwargs):
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    with (
        mock.patch.object(interpreter, "_patch_lang", lambda fn: patch_lang(modules)),
        mock.patch.object(interpreter.InterpretedFunction, "__call__", call),
        mock.patch.object(builder, "options", options),
    ):
        yield


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

    def create_dot_scaled(
        self, a, a_scale, a_form, b, b_scale, b_form, fast_math, a_pack, b_pack, d
    ):
        return exact.dot_scaled(
            a, a_scale, a_form, b, b_scale, b_form, a_pack, b_pack, d
        )

    patches = (
        cast_impl,
        create_fp_to_fp,
        binary_op,
        unary_op,
        create_dot,
        create_dot_scaled,
    )
    for patch in patches:
        if patch.__name__ in original:
            setattr(exact.builder, patch.__name__, patch)
    try:
        with _less_bookkeeping():
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


class CheckedMemory:
    """Mixin of test cases: exact floats, checked memory, and NaN in fresh allocations."""

    def setUp(self) -> None:
        # Not imported by benchmarks, whose machine may lack what it needs.
        from torch.testing._internal.common_utils import DeterministicGuard

        super().setUp()
        self.sanitizer = MemorySanitizer()
        for context in (
            exact_floats(),
            self.sanitizer(),
            DeterministicGuard(True, fill_uninitialized_memory=True),
        ):
            context.__enter__()
            self.addCleanup(context.__exit__, None, None, None)
