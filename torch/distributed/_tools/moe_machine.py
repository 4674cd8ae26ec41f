# mypy: allow-untyped-defs
"""The profile of the machine at hand: measured once, and kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._moe.groups import scalar_device
from torch.distributed._tools.moe_calibration import calibrate
from torch.distributed._tools.moe_profile import CpuConstants, DEVICES, Profile
from torch.distributed._tools.moe_train_calibration import measure_training
from torch.distributed.device_mesh import init_device_mesh


__all__ = ["device_type", "machine_profile"]

CALIBRATION_SECONDS = 4.0


def machine_profile(
    device: str = "cpu", *, cache: bool = True, clock: str = "wall"
) -> Profile:
    """The profile of this machine: measured in a few seconds, and kept in torch's cache folder.

    Collective over the default process group, whose links are measured as well; all ranks get
    the profile of rank 0. ``clock`` is as in :func:`.moe_calibration.calibrate`: ``"process"`` for
    process time, on a machine with other jobs.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    ranks = 1 if group is None else dist.get_world_size()
    if group is not None:
        # Selects this rank's accelerator before measuring, if the script has not.
        init_device_mesh(device, (ranks,))
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
    constants = [
        f.name for f in dataclasses.fields(CpuConstants)
    ]  # of older ones are fewer
    key = f"{socket.gethostname()} {device} {name} {ranks} {clock} {torch.__version__} {constants}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = Path(torch.hub._get_torch_home(), "moe_profiles", f"{digest}.json")
    known = path.read_text() if cache and path.exists() else None
    known = _from_first_rank(known)
    if known is None:
        seconds = CALIBRATION_SECONDS
        some = group if ranks > 1 else None
        p = calibrate(device=device, gpu=gpu, group=some, seconds=seconds, clock=clock)
        if device == "cpu":
            p = measure_training(p, some, clock)
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


def device_type() -> str:
    group = dist.group.WORLD if dist.is_initialized() else None
    return "cpu" if group is None else scalar_device(group).type
