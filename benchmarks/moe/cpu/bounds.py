"""A fair lower bound on the time of a row: arithmetic at the rate of at::mm, bytes at that of memory.

The rate of at::mm is measured on the row's own matrices: as many rows as an expert has on average,
with operands and result in the cache and nothing allocated. The bytes are those no implementation
can do without: the weights of the experts that are hit, input and output, and for a backward the
pre-activation there and back and the gradients. Both rates are measured in every round of a row,
so that what slows the machine down slows the bound down with the forms.
"""

import statistics
import time
from collections.abc import Callable, Sequence

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


def _stream(size: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Reading so many bytes, and copying half of them, which moves as many."""
    source = torch.ones(size // 4)
    half = source[: len(source) // 2]
    target = torch.empty_like(half)
    return source.sum, lambda: target.copy_(half)


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


def _mm(
    m: int, k: int, n: int, transposed: tuple[bool, bool], dtype: torch.dtype
) -> Callable[[], object]:
    def matrix(rows: int, columns: int, as_view: bool) -> Tensor:
        if as_view:
            return torch.randn(columns, rows).to(dtype).t()
        return torch.randn(rows, columns).to(dtype)

    a, b = matrix(m, k, transposed[0]), matrix(k, n, transposed[1])
    out = torch.empty(m, n, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def flops(row: Row) -> int:
    """Of all products of a layer."""
    return 2 * sum(m * k * n for m, k, n in products(row, row.case.rows))


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


class Bound:
    """The bound of a row; times are of all layers of a call.

    Args:
        stream_bytes: to measure the rate of memory with.

    Attributes:
        rows: of an average expert.
    """

    def __init__(self, row: Row, operands: Operands, stream_bytes: int = STREAM_BYTES):
        self.row = row
        self.rows = max(1, round(row.case.rows / row.case.num_experts))
        self.hits = hit_experts(operands)
        self._products = products(row, self.rows)
        self._mm = [
            _mm(*mkn, transposed, row.dtype)
            for mkn, transposed in zip(self._products, _transposed(row))
        ]
        self.stream_bytes = stream_bytes
        self._stream = _stream(stream_bytes)

    def rates(self, budget: float = 0.02) -> tuple[float, float]:
        """FLOPs and bytes per second now.

        Args:
            budget: seconds for each product and each way to stream, or 3 calls of it.
        """
        stream = min(_median_seconds(function, budget) for function in self._stream)
        seconds = sum(_median_seconds(product, budget) for product in self._mm)
        work = 2 * sum(m * k * n for m, k, n in self._products)
        return work / seconds, self.stream_bytes / stream

    def seconds(self, mm_rate: float, stream_rate: float) -> tuple[float, float]:
        """Of arithmetic and of bytes, at these rates."""
        layers = self.row.layers
        return (
            layers * flops(self.row) / mm_rate,
            layers * compulsory_bytes(self.row, self.hits) / stream_rate,
        )

    def as_json(self, rates: Sequence[tuple[float, float]]) -> dict[str, object]:
        """What a row of the JSON says of its bound, by the medians of the rates."""
        mm_rate, stream_rate = map(statistics.median, zip(*rates))
        compute, memory = self.seconds(mm_rate, stream_rate)
        return {
            "milliseconds": 1e3 * max(compute, memory),
            "limited_by": "compute" if compute >= memory else "memory",
            "compute_milliseconds": 1e3 * compute,
            "memory_milliseconds": 1e3 * memory,
            "gflop": self.row.layers * flops(self.row) / 1e9,
            "mm_tflops": mm_rate / 1e12,
            "mm_rows": self.rows,
            "hit_experts": self.hits,
            "stream_gb_per_second": stream_rate / 1e9,
        }
