"""A fair lower bound on the time of a row: arithmetic at the rate of at::mm, bytes at that of memory.

The rate of at::mm is measured in this run on the row's own matrices: as many rows as an expert has
on average, with operands and result in the cache and nothing allocated. The bytes are those no
implementation can do without: the weights of the experts that are hit, input and output, and for a
backward the pre-activation there and back and the gradients.
"""

import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from .shapes import Operands, Row


STREAM_BYTES = 1 << 30  # far beyond the cache


def _median_seconds(function: Callable[[], object], budget: float) -> float:
    function()
    seconds, end = [], time.perf_counter() + budget
    while len(seconds) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


@functools.cache
def stream_bytes_per_second() -> float:
    """Memory bandwidth: the faster of reading and copying."""
    source = torch.ones(STREAM_BYTES // 4)
    read = STREAM_BYTES / _median_seconds(source.sum, 0.5)
    half = source[: len(source) // 2]
    target = torch.empty_like(half)
    copy = STREAM_BYTES / _median_seconds(lambda: target.copy_(half), 0.5)
    return max(read, copy)


def products(row: Row, rows: int) -> list[tuple[int, int, int]]:
    """(m, k, n) of the matrix products of one expert."""
    D, F = row.case.dim, row.case.hidden
    forward = [(rows, D, 2 * F), (rows, F, D)]
    if not row.backward:
        return forward
    return forward + [
        (rows, D, F),  # dA = dO W_out
        (rows, 2 * F, D),  # dX = dH W_in
        (2 * F, rows, D),  # dW_in = dH^T X
        (D, rows, F),  # dW_out = dO^T A
    ]


def _transposed(row: Row) -> list[tuple[bool, bool]]:
    """Which operands of products() are transposed views, where weights are (out, in)."""
    forward = [(False, True), (False, True)]
    return forward + [(False, False), (False, False), (True, False), (True, False)]


@functools.cache
def _mm_seconds(
    m: int, k: int, n: int, transposed: tuple[bool, bool], dtype: torch.dtype
) -> float:
    def matrix(rows: int, columns: int, as_view: bool) -> Tensor:
        if as_view:
            return torch.randn(columns, rows).to(dtype).t()
        return torch.randn(rows, columns).to(dtype)

    a, b = matrix(m, k, transposed[0]), matrix(k, n, transposed[1])
    out = torch.empty(m, n, dtype=dtype)
    return _median_seconds(lambda: torch.mm(a, b, out=out), 0.1)


def flops(row: Row) -> int:
    """Of all products of a layer."""
    return 2 * sum(m * k * n for m, k, n in products(row, row.case.rows))


def mm_flops_per_second(row: Row) -> tuple[float, int]:
    """Rate of at::mm on the products of an average expert, and that expert's rows."""
    rows = max(1, round(row.case.rows / row.case.num_experts))
    seconds = sum(
        _mm_seconds(*mkn, transposed, row.dtype)
        for mkn, transposed in zip(products(row, rows), _transposed(row))
    )
    return 2 * sum(m * k * n for m, k, n in products(row, rows)) / seconds, rows


def hit_experts(operands: Operands) -> float:
    """Experts with rows, averaged over layers and routings."""
    hits = [len(i.unique()) for layers in operands.indices for i in layers]
    return statistics.mean(hits)


def compulsory_bytes(row: Row, hits: float) -> float:
    """Bytes that a layer has to read and to write."""
    c = row.case
    expert = 3 * c.dim * c.hidden
    elements = hits * expert + 2 * c.num_tokens * c.dim
    if row.backward:
        # pre-activation written and read; dY, X read again, dX; weights again, dW of all experts
        elements += 2 * 2 * c.rows * c.hidden + 3 * c.num_tokens * c.dim
        elements += (hits + c.num_experts) * expert
    return elements * row.dtype.itemsize


def bound(row: Row, operands: Operands) -> dict[str, object]:
    """The bound of a row, as its JSON has it; times are of all layers of a call."""
    rate, rows = mm_flops_per_second(row)
    hits, bandwidth = hit_experts(operands), stream_bytes_per_second()
    compute = row.layers * flops(row) / rate
    memory = row.layers * compulsory_bytes(row, hits) / bandwidth
    return {
        "milliseconds": 1e3 * max(compute, memory),
        "limited_by": "compute" if compute >= memory else "memory",
        "compute_milliseconds": 1e3 * compute,
        "memory_milliseconds": 1e3 * memory,
        "gflop": row.layers * flops(row) / 1e9,
        "mm_tflops": rate / 1e12,
        "mm_rows": rows,
        "hit_experts": hits,
        "stream_gb_per_second": bandwidth / 1e9,
    }
