# mypy: allow-untyped-defs
"""Profile of a device: its data sheet, and the constants that no data sheet has.

Peaks come from ``torch._inductor.analysis.device_info`` if it
has them. The constants of GPUs are in :data:`FITTED`, fitted on published rows and labelled
so; ``moe_calibration`` measures those of the machine at hand.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch.distributed._tools.moe_arguments import read_json


if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = [
    "BOUNDS", "Constants", "CpuConstants", "DEVICES", "Device", "FITTED", "FITTED_PROVENANCE",
    "HELD_OUT_ERROR", "Profile", "profile",
]  # fmt: skip


@dataclass(frozen=True)
class Device:
    """Data sheet of a device: dense FLOP/s and B/s of one direction.

    Attributes:
        generation (str): devices of a generation share their fitted constants.
        units (int): SMs, compute units or cores.
        bf16, fp8, fp4 (float): dense FLOP/s; fp8 doubles where the sheet has no fp4.
        memory_rate (float): B/s of device memory.
        fast (float): B/s a device sends into its domain (NVLink, xGMI).
        slow (float): B/s a device sends out of it (a network card per device).
        memory (float): bytes.
        cache (float): bytes of the last cache level.
        domain (int): devices joined by the fast link in the usual machine.
    """

    generation: str
    units: int
    bf16: float
    fp8: float
    memory_rate: float
    fast: float
    slow: float
    memory: float
    cache: float = 50e6
    domain: int = 8
    fp4: float = 0.0

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes that its units multiply: keys of ``moe_cost_model.ITEMSIZE``."""
        return ("fp32", "bf16", "fp16", *_LOW_PRECISION.get(self.generation, ()))


# Of NVIDIA and AMD product sheets; an FP4 format of CDNA 4 has no constants here.
_LOW_PRECISION = {
    "hopper": ("fp8",),
    "blackwell": ("mxfp8", "fp8", "nvfp4", "fp8xfp4"),
    "cdna": ("fp8",),
}


class _Sheet(NamedTuple):
    """Values that ``device_info`` lacks; ``bf16`` to ``memory`` only if it lacks the device."""

    info: str | None
    generation: str
    units: int
    fast: float
    slow: float
    domain: int = 8
    cache: float = 50e6
    bf16: float = 0.0
    memory_rate: float = 0.0
    memory: float = 0.0


# Links and units: NVIDIA and AMD product sheets. H800 is an H100 with 400 GB/s of NVLink.
_SHEETS = {
    "A100": _Sheet("NVIDIA A100", "ampere", 108, 300e9, 25e9, cache=40e6),
    "H100": _Sheet("NVIDIA H100", "hopper", 132, 450e9, 50e9),
    "H800": _Sheet("NVIDIA H100", "hopper", 132, 200e9, 50e9),
    "H200": _Sheet(
        "NVIDIA H100", "hopper", 132, 450e9, 50e9, 8, 50e6, 0, 4.8e12, 141e9
    ),
    "B200": _Sheet("NVIDIA B200", "blackwell", 148, 900e9, 50e9, 8, 126e6),
    "GB200": _Sheet(
        "NVIDIA GB300", "blackwell", 148, 900e9, 50e9, 72, 126e6, 0, 8e12, 186e9
    ),
    "B300": _Sheet(
        "NVIDIA B200", "blackwell", 148, 900e9, 100e9, 8, 126e6, 0, 8e12, 270e9
    ),
    "GB300": _Sheet("NVIDIA GB300", "blackwell", 148, 900e9, 100e9, 72, 126e6),
    "MI300X": _Sheet("AMD MI300X", "cdna", 304, 448e9, 50e9, cache=256e6),
    "MI355X": _Sheet("AMD MI355X", "cdna", 256, 537e9, 50e9, cache=256e6),
}


@functools.cache
def _device(name: str) -> Device:
    from torch._inductor.analysis.device_info import lookup_device_info

    sheet = _SHEETS[name]
    info = lookup_device_info(sheet.info) if sheet.info else None
    if info is None:
        raise ValueError(f"device_info has no {sheet.info!r} any more")
    dense = 1e12 / info.tops_sparsity_factor
    bf16 = sheet.bf16 or info.tops[torch.bfloat16] * dense
    fp8 = info.tops.get(torch.float8_e5m2, 0) * dense or 2 * bf16
    if sheet.generation == "ampere":
        fp8 = bf16
    return Device(
        generation=sheet.generation,
        units=sheet.units,
        bf16=bf16,
        fp8=fp8,
        memory_rate=sheet.memory_rate or info.dram_bw_gbs * 1e9,
        fast=sheet.fast,
        slow=sheet.slow,
        memory=sheet.memory or info.dram_gb * 1e9,
        cache=sheet.cache,
        domain=sheet.domain,
        fp4=2 * fp8 if sheet.generation == "blackwell" else 0.0,
    )


DEVICES = tuple(_SHEETS)


@dataclass(frozen=True)
class Constants:
    """Fitted constants of a generation of devices. :data:`BOUNDS` has start and range.

    Attributes:
        mma16, mma8: share of the data sheet's FLOP/s that the best products reach.
        memory: share of the data sheet's memory rate that streams reach.
        tile_start: start and end of an output tile, in bytes of the summed dimension.
        launch_us: of a kernel.
        grouped16, grouped8: ``torch._grouped_mm`` and its scaled form against the best.
        fast, slow: share of the links' rate.
        fast_us, slow_us: start of an exchange inside and outside of the domain.
        floor_us: shortest time to read and sum remote rows in a one-sided combine; stores
            of a dispatch take a quarter.
        setup_us: counts, notification and the host's wait before an exchange.
        fabric: rate lost each time the number of ranks doubles beyond eight.
        unit_rate: B/s that one SM of a communication kernel moves.
        row_bytes: bytes that a row costs such an SM beside its own.
        host_us: of a layer's forward and backward, on the host, without CUDA graphs.
        expert_us: the same for each expert of the rank, as frameworks quantise them one by one.
        exposed: share of a layer's exchange that an overlapped schedule does not hide.
        stack: measured time of a layer in training over the sum of its kernels, which
            were measured alone and at higher clocks.
        drift: gain in speed per year of software.
    """

    mma16: float = 0.70
    mma8: float = 0.70
    memory: float = 0.85
    tile_start: float = 300.0
    launch_us: float = 4.0
    grouped16: float = 0.85
    grouped8: float = 0.85
    fast: float = 0.75
    slow: float = 0.88
    fast_us: float = 18.0
    slow_us: float = 35.0
    floor_us: float = 12.0
    setup_us: float = 100.0
    fabric: float = 0.02
    unit_rate: float = 40e9
    row_bytes: float = 2000.0
    host_us: float = 3000.0
    expert_us: float = 200.0
    exposed: float = 0.6
    stack: float = 1.25
    drift: float = 0.2


BOUNDS: dict[str, tuple[float, float]] = {
    "mma16": (0.4, 0.95), "mma8": (0.3, 0.95), "memory": (0.5, 0.95), "tile_start": (5, 900),
    "launch_us": (1, 12), "grouped16": (0.4, 1.0), "grouped8": (0.4, 1.0), "fast": (0.3, 0.98),
    "slow": (0.3, 1.0), "fast_us": (5, 100), "slow_us": (10, 300), "floor_us": (1, 60),
    "setup_us": (1, 600), "fabric": (0.001, 0.15), "unit_rate": (10e9, 200e9),
    "row_bytes": (10, 8000), "host_us": (300, 12000), "expert_us": (1, 1000), "exposed": (0.05, 1.0),
    "stack": (0.8, 2.0), "drift": (0.001, 0.6),
}  # fmt: skip


@dataclass(frozen=True)
class CpuConstants:
    """A CPU, for the kernel of ``_moe_mlp`` with its threads. Fitted by a microbenchmark.

    Attributes:
        rate16, rate32: FLOP/s of bf16 and of float32 products with many rows.
        half_rows: rows of a block of an expert that reach half of the rate, if the
            weights are transposed for the product.
        half_rows_t: the same for weights in its order: forward of transposed ones.
        thin_rows: most rows of an expert for which weights are read as stored, if
            the product has a kernel for that (kFewRows of MoEMicroGemmX86.h); else 0.
        wgrad: rate of products of the weights' gradients against the others.
        memory: B/s of weights and activations.
        fault: B/s of memory that is touched for the first time.
        expert_us: fixed cost of an expert.
        call_us: fixed cost of a call.
        exchange_us: fixed cost of a dispatch and its combine beside their messages:
            routing, and the calls that make messages and sums of them.
        exchange_grad_us: the same of their backward, which routes nothing.
        copy: B/s of rows that are gathered into messages, and summed where they return.
        turn: bytes to others above which the directions of an all-to-all take turns, as gloo
            posts each send before its receive, and sockets buffer this much. 0 for never.
        op_us: cost of an op in training beside its bytes and products: Python, dispatch, autograd.
        recompute_us: the same for an op that activation checkpointing runs again.
        shard_us: cost of FSDP for the shards of a layer, three times a step.
        shard: B/s of a rank's shards that are gathered, and of gradients that are scattered.
        tp_us: cost of a module under tensor parallelism, forward and backward, beside its bytes.
        reduce: B/s of activations that ranks of tensor parallelism sum.
    """

    rate16: float = 8e11
    rate32: float = 3e11
    half_rows: float = 12.0
    half_rows_t: float = 12.0
    thin_rows: float = 0.0
    wgrad: float = 0.9
    memory: float = 5e10
    fault: float = 4e9
    expert_us: float = 20.0
    call_us: float = 100.0
    exchange_us: float = 500.0
    exchange_grad_us: float = 200.0
    copy: float = 5e9
    turn: float = 0.0
    op_us: float = 10.0
    recompute_us: float = 40.0
    shard_us: float = 300.0
    shard: float = 1e9
    tp_us: float = 1000.0
    reduce: float = 5e8


@dataclass(frozen=True, eq=False)  # a key of caches by identity
class Profile:
    """A device, its fitted constants, and where they come from.

    Attributes:
        name (str): of the device.
        device (Device): its data sheet.
        constants (Constants): its fitted constants.
        provenance (str): ``measured ...`` here, or ``fitted on published rows``.
        cpu (CpuConstants, optional): of a machine without an accelerator.
    """

    name: str
    device: Device
    constants: Constants
    provenance: str = "data sheet and start values, not fitted"
    cpu: CpuConstants | None = None

    def check_dtype(self, who: str, dtype: str) -> None:
        """Raises ValueError where the device does not multiply ``dtype``."""
        if dtype not in self.device.dtypes:
            raise ValueError(
                f"{who}: dtype must be one that {self.name} multiplies, "
                f"{', '.join(self.device.dtypes)}, got {dtype!r}"
            )

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` reads."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any] | str) -> Profile:
        """From the dict of :meth:`to_json`, or from the path of a JSON file."""
        where = data if isinstance(data, str) else "Profile.from_json"
        if isinstance(data, str):
            data = read_json(data)
        data = data.get("profile", data)
        wanted = {"name", "device", "constants", "provenance"}
        if not isinstance(data, dict) or not wanted <= data.keys():
            raise ValueError(
                f"{where}: expected name, device, constants and provenance as written by "
                f"moe_calibration, got {sorted(data) if isinstance(data, dict) else data!r}"
            )
        return Profile(
            str(data["name"]),
            _read(Device, data, "device", where),
            _read(Constants, data, "constants", where),
            str(data["provenance"]),
            _read(CpuConstants, data, "cpu", where) if data.get("cpu") else None,
        )


# Times, sizes and counts may be 0; rates and shares may not.
_MAY_BE_ZERO = re.compile(
    "fp4|cache|fabric|drift|row_bytes|turn|thin_rows|tile_.*|.*_us"
)


def _read(cls: Any, data: Mapping[str, Any], part: str, where: str) -> Any:
    """A dataclass of numbers from ``data[part]``.

    Raises:
        ValueError: with ``where`` and the key.
    """
    values, fields = data[part], {f.name: f for f in dataclasses.fields(cls)}
    if not isinstance(values, dict) or (unknown := values.keys() - fields.keys()):
        got = sorted(unknown) if isinstance(values, dict) else values
        raise ValueError(f"{where}: {part} has {', '.join(fields)}, got {got!r}")
    for name, field in fields.items():
        if name not in values:
            if field.default is dataclasses.MISSING:
                raise ValueError(f"{where}: {part}.{name} is missing")
            continue
        value, zero = values[name], bool(_MAY_BE_ZERO.fullmatch(name))
        if field.type == "str":
            bad, kind = not isinstance(value, str), "a string"
        else:
            kinds = (int,) if field.type == "int" else (int, float)
            bad = isinstance(value, bool) or not isinstance(value, kinds)
            bad = bad or not (0 < value < 1e300 or zero and not value)
            kind = f"{'an integer' if field.type == 'int' else 'a number'} "
            kind += "from 0 on" if zero else "above 0"
        if bad:
            raise ValueError(f"{where}: {part}.{name} must be {kind}, got {value!r}")
    return cls(**values)


def profile(name: str) -> Profile:
    """The profile of a GPU by name, one of :data:`DEVICES`, or of a JSON file by path.

    Constants are fitted on published rows, as no such GPU was at hand.
    """
    if isinstance(name, str) and name.endswith(".json"):
        return Profile.from_json(name)
    if name not in DEVICES:
        raise ValueError(
            f"profile: device must be one of {', '.join(DEVICES)} or the path of a "
            f".json profile of moe_calibration, got {name!r}"
        )
    return _profile(name)


@functools.cache
def _profile(name: str) -> Profile:
    device = _device(name)
    fitted = FITTED.get(device.generation)
    if fitted is None:
        return Profile(name, device, Constants())
    return Profile(name, device, Constants(**fitted), FITTED_PROVENANCE)


# Written by `python benchmarks/moe/published.py --fit`.
FITTED_PROVENANCE = "fitted on published rows"
FITTED: dict[str, dict[str, float]] = {
    "hopper": {
        "mma16": 0.8976, "mma8": 0.7, "memory": 0.7785, "tile_start": 300.0,
        "launch_us": 1.0, "grouped16": 0.85, "grouped8": 0.85, "fast": 0.75, "slow": 0.9852,
        "fast_us": 32.74, "slow_us": 34.48, "floor_us": 12.0, "setup_us": 125.0,
        "fabric": 0.02198, "unit_rate": 40280000000.0, "row_bytes": 2000.0,
        "host_us": 787.1, "expert_us": 149.7, "exposed": 0.566,
        "stack": 1.219, "drift": 0.04171,
    },
    "blackwell": {
        "mma16": 0.4547, "mma8": 0.5709, "memory": 0.7589, "tile_start": 100.0,
        "launch_us": 9.853, "grouped16": 0.79, "grouped8": 0.5524, "fast": 0.75,
        "slow": 1.0, "fast_us": 14.5, "slow_us": 35.0, "floor_us": 16.93,
        "setup_us": 148.4, "fabric": 0.02052, "unit_rate": 55170000000.0,
        "row_bytes": 2012.0, "host_us": 787.1, "expert_us": 149.7, "exposed": 0.566,
        "stack": 1.001, "drift": 0.04171,
    },
    "cdna": {
        "mma16": 0.7, "mma8": 0.7, "memory": 0.85, "tile_start": 300.0, "launch_us": 4.0,
        "grouped16": 0.85, "grouped8": 0.85, "fast": 0.75, "slow": 0.88, "fast_us": 18.0,
        "slow_us": 35.0, "floor_us": 12.0, "setup_us": 100.0, "fabric": 0.02,
        "unit_rate": 40000000000.0, "row_bytes": 2000.0, "host_us": 787.1, "expert_us": 149.7, "exposed": 0.566,
        "stack": 1.325, "drift": 0.04171,
    },
}  # fmt: skip


# Median relative error on the published rows that were held out, and how many those are, by
# level: the table of docs/source/distributed.moe_planner.md. Few rows say little.
HELD_OUT_ERROR = {
    "a2a": (0.05, 112),
    "gemm": (0.078, 17),
    "layer1": (0.194, 9),
    "layer_ep": (0.136, 17),
    "infer": (0.118, 6),
    "train": (0.108, 72),
}
