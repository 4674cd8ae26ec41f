# mypy: allow-untyped-defs
"""Ranges of the numbers that the performance model takes, and one-line errors that name them."""

from __future__ import annotations

import argparse
import json
import numbers
from typing import Any, cast, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn


__all__ = [
    "ArgumentParser",
    "check",
    "check_dtypes",
    "check_layer",
    "RANGES",
    "read_json",
]

# Smallest and largest value. Integers bound a whole number, floats any finite one. The upper
# ends are far beyond real machines: a larger value is a typing error.
# fmt: off
RANGES: dict[str, tuple[float, float]] = {
    # of a machine and of a layout
    "gpus": (1, 1 << 20), "ep": (1, 1 << 16), "tp": (1, 1 << 10), "pp": (1, 1 << 10),
    "cp": (1, 1 << 10), "expert_tp": (1, 1 << 10), "virtual": (1, 1 << 10),
    "micro_batch": (1, 1 << 16), "node_limit": (0, 1 << 16), "domain": (0, 1 << 20),
    "graphs": (0, 2), "replicate": (1, 1 << 20), "gradient_bytes": (1.0, 8.0),
    "optimizer_bytes": (0.0, 32.0),
    # of a step
    "batch": (1, 1 << 30), "global_batch": (1, 1 << 30), "batch_per_dp": (1, 1 << 30),
    "seq": (1, 1 << 24), "context": (0, 1 << 24), "tokens": (1, 1 << 28),
    "redundant": (0, 1 << 16), "imbalance": (1.0, 1e5), "exposed": (0.0, 1.0),
    "year": (2015.0, 2050.0), "top": (1, 1 << 30), "load": (0.0, 1e30),
    # of a job
    "steps": (1, 1 << 16), "seed": (0, 2**63 - 1), "expert_share": (0.0, 1.0),
    "jitter": (0.0, 10.0), "silicon": (0.0, 10.0), "slow_share": (0.0, 1.0),
    "slow_by": (0.0, 100.0), "mtbf_hours": (1.0, 1e15), "detect_seconds": (0.0, 1e7),
    "restart_seconds": (0.0, 1e7), "save_seconds": (0.0, 1e7),
    # of a measurement
    "seconds": (0.0, 3600.0),
    # of a model
    "layers": (1, 10_000), "d": (1, 1 << 20), "f": (1, 1 << 20), "experts": (1, 1 << 16),
    "k": (1, 1 << 16), "heads": (1, 1 << 14), "kv_heads": (1, 1 << 14),
    "head_dim": (1, 1 << 14), "vocab": (1, 1 << 24), "shared_f": (0, 1 << 20),
    "dense": (0, 10_000), "dense_f": (0, 1 << 20), "window": (0.0, 1.0), "mtp": (0, 100),
    "q_lora": (0, 1 << 20), "kv_lora": (1, 1 << 20), "nope": (1, 1 << 14), "rope": (1, 1 << 14),
    "v_dim": (1, 1 << 14),
    # of a layer's share: means over ranks or chunks, which need not be whole
    "rows": (0.0, 1e18), "width": (0.0, 2.0**20), "local": (1e-5, 1e5), "units": (0, 1 << 16),
    "chunks": (1, 1 << 16),
}
# fmt: on


def _is_in(value: Any, low: float, high: float) -> bool:
    kind = numbers.Integral if isinstance(low, int) else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    return low <= cast(float, value) <= high  # not of NaN


def _described(low: float, high: float) -> str:
    kind = "an integer" if isinstance(low, int) else "a number"
    return f"must be {kind} from {low:,} to {high:,}"


def check(who: str, names: Mapping[str, str] | None = None, **values: Any) -> None:
    """Compares numbers with their :data:`RANGES`.

    Args:
        who (str): function or file that got them.
        names (dict, optional): the caller's names of arguments, if they differ.
        values: the arguments.

    Raises:
        ValueError: with argument, range and value.
    """
    for name, value in values.items():
        if not _is_in(value, *RANGES[name]):
            shown = (names or {}).get(name, name)
            raise ValueError(
                f"{who}: {shown} {_described(*RANGES[name])}, got {value!r}"
            )


def check_layer(
    who: str, tokens: float, d: int, f: int, num_experts: int, k: int, ep: int
) -> None:
    """:func:`check` of an expert-parallel layer, whose ranks have equally many experts."""
    names = {"rows": "tokens", "experts": "num_experts"}
    check(who, names, rows=tokens, d=d, f=f, experts=num_experts, k=k, ep=ep)
    if k > num_experts or num_experts % ep:
        raise ValueError(
            f"{who}: num_experts must be at least k and a multiple of ep, got "
            f"{num_experts}, k = {k} and ep = {ep}"
        )


def check_dtypes(who: str, dtypes: Sequence[str] | None) -> None:
    if isinstance(dtypes, str) or (dtypes is not None and not dtypes):
        raise ValueError(
            f"{who}: dtypes must be a sequence of at least one dtype, got {dtypes!r}"
        )


class ArgumentParser(argparse.ArgumentParser):
    """A command line whose errors are ValueErrors of one line, and whose numbers have ranges."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def add_number(self, flag: str, **options: Any) -> None:
        """An option that is compared with the range of its name."""
        low, high = RANGES[name := flag.strip("-").replace("-", "_")]

        def parsed(text: str) -> float:
            try:
                value = int(text) if isinstance(low, int) else float(text)
            except ValueError:
                value = None
            if value is None or not _is_in(value, low, high):
                raise argparse.ArgumentTypeError(
                    f"{_described(low, high)}, got {text!r}"
                )
            return value

        self.add_argument(flag, dest=name, type=parsed, **options)


def read_json(path: str, kind: type = dict) -> Any:
    """The object of a JSON file, or another ``kind`` of value.

    Raises:
        ValueError: the file, which it names, has something else.
    """
    try:
        with open(path) as file:
            data = json.load(file)
    except ValueError as e:
        raise ValueError(f"{path}: is not JSON: {e}") from e
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}") from e
    if not isinstance(data, kind):
        raise ValueError(
            f"{path}: must hold a {kind.__name__}, got a {type(data).__name__}"
        )
    return data
