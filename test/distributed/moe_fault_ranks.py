"""What tests of faults share: their ranks are no tests, and import little."""

import argparse
import datetime
import importlib
import json
import socket
from pathlib import Path

import torch
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def init_ranks(rank: int, world_size: int, port: int, seconds: float) -> None:
    """Joins the gloo group of this machine, with a timeout of ``seconds``."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=seconds),
    )


def run_seeds(description, run_seed) -> int:
    """Prints ``run_seed(seed)``, a line of JSON a seed. Returns 1 if one has problems."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "COUNT"))
    parser.add_argument("--log", type=Path, help="also write the lines to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Or each rank imports it.
    importlib.import_module("torch._dynamo")
    bad = 0
    for seed in range(args.seeds[0], sum(args.seeds)):
        row = run_seed(seed)
        bad += bool(row["problems"])
        print(json.dumps(row), flush=True)
        if args.log:
            with args.log.open("a") as log:
                log.write(json.dumps(row) + "\n")
    return 1 if bad else 0
