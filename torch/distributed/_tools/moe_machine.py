# mypy: allow-untyped-defs
"""The profile of the machine at hand: measured once, and kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._moe.exchange import scalar_device
from torch.distributed._tools.moe_calibration import calibrate, measure_calls
from torch.distributed._tools.moe_profile import DEVICES, Profile
from torch.distributed._tools.moe_trace import estimated_seconds


__all__ = ["device_type", "machine_profile", "measure_stack"]


CALIBRATION_SECONDS = 4.0


def machine_profile(
    device: str = "cpu", *, cache: bool = True, clock: str = "wall"
) -> Profile:
    """The profile of this machine: measured in a few seconds, and kept in torch's cache folder.

    Collective over the default process group, whose links are measured as well; all ranks get
    that of rank 0. ``clock`` is :func:`.moe_calibration.calibrate`'s: ``"process"`` for the time that
    the ranks have a core, on a machine with neighbours.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    ranks = 1 if group is None else dist.get_world_size()
    name = f"{torch.get_num_threads()} {torch.backends.cpu.get_cpu_capability()}"
    gpu = None
    if device == "cuda":
        name = torch.cuda.get_device_name()
        gpu = next((d for d in reversed(DEVICES) if d in name), None)
        if gpu is None:
            raise ValueError(
                f"parallelize_moe: profile must be given for {name}: the data sheets are of "
                f"{', '.join(DEVICES)}"
            )
    key = f"{socket.gethostname()} {device} {name} {ranks} {clock} {torch.__version__}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = Path(torch.hub._get_torch_home(), "moe_profiles", f"{digest}.json")
    known = path.read_text() if cache and path.exists() else None
    known = _from_first_rank(known)
    if known is None:
        seconds = CALIBRATION_SECONDS
        some = group if ranks > 1 else None
        p = calibrate(device=device, gpu=gpu, group=some, seconds=seconds, clock=clock)
        if device == "cpu":
            constants = dataclasses.replace(p.constants, stack=measure_stack(p, clock))
            p = dataclasses.replace(p, constants=constants)
        known = _from_first_rank(json.dumps(p.to_json()))
        if cache and (not dist.is_initialized() or dist.get_rank() == 0):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(known)
            partial.replace(path)
    return Profile.from_json(json.loads(known))


def _from_first_rank(value: Any) -> Any:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def measure_stack(p: Profile, clock: str = "wall", seconds: float = 1.0) -> float:
    """``Constants.stack`` of a CPU: a layer of attention as it runs, over the sum of its ops."""
    width, gen = 512, torch.Generator().manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 8, 2 * width, 0.0, batch_first=True)
    x = torch.randn(1, 256, width, generator=gen, requires_grad=True)

    def call() -> None:
        layer(x).sum().backward()

    tick = time.process_time if clock == "process" else time.perf_counter
    (measured,) = measure_calls([call], seconds, tick)
    return measured / estimated_seconds(layer, p, call)


def device_type() -> str:
    group = dist.group.WORLD if dist.is_initialized() else None
    return "cpu" if group is None else scalar_device(group).type
