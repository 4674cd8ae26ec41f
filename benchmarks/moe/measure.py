"""How the MoE benchmarks measure: time, saved bytes, allocated bytes, and where a number is from."""

import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor


Name = TypeVar("Name", bound=Hashable)


class Spread(NamedTuple):
    """Median and the 10th and 90th percentile."""

    median: float
    p10: float
    p90: float


def spread(values: Iterable[float]) -> Spread:
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(deciles[4], deciles[0], deciles[8])


def interleaved_seconds(
    functions: dict[Name, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 3,
    on_round: Callable[[int], None] = lambda i: None,
    before: Callable[[], object] = lambda: None,
) -> dict[Name, list[float]]:
    """Time every function once per round, so that drift of the machine hits all alike.

    The order within a round rotates. Entry i of every list is from round i, so two lists may be
    compared pairwise.
    """
    names = list(functions)
    seconds: dict[Name, list[float]] = {name: [] for name in names}
    for i in range(warmup + rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            before()
            start = time.perf_counter()
            functions[name]()
            if i >= warmup:
                seconds[name].append(time.perf_counter() - start)
        on_round(i)
    return seconds


def paired_ratio(numerator: list[float], denominator: list[float]) -> Spread:
    return spread([a / b for a, b in zip(numerator, denominator, strict=True)])


def saved_bytes(forward: Callable[[], object], parameters: Iterable[Tensor]) -> int:
    """Bytes that ``forward`` keeps alive for its backward.

    Whole storages, each once, so a saved view counts for what it keeps alive. Holds for eager
    code and for a compiled function, whose one autograd node saves what the partitioner chose.

    Args:
        forward: builds the graph; already compiled if it is to be measured compiled.
        parameters: tensors that live anyway and are not counted.
    """
    excluded = {p.untyped_storage().data_ptr() for p in parameters}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        # Holding the storage keeps its address from being handed out again.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        graph = forward()
    del graph
    return sum(storage.nbytes() for storage in storages.values())


def peak_bytes(function: Callable[[], object]) -> int:
    """Highest number of bytes that were allocated at once while ``function`` ran.

    From the allocator events of torch.profiler: every allocation through c10, temporary or not.
    Scratch memory that a BLAS library allocates by itself is not seen.
    """
    from torch._C._profiler import _EventType
    from torch.profiler import profile, ProfilerActivity

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it reports a missing GPU
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        function()
    events = list(prof.profiler.kineto_results.experimental_event_tree())
    allocations = []
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            allocations.append((event.start_time_ns, event.extra_fields.alloc_size))
    allocated = peak = 0
    for _, size in sorted(allocations, key=lambda allocation: allocation[0]):
        allocated += size  # negative when freed
        peak = max(peak, allocated)
    return peak


def end_rank() -> NoReturn:
    """Ends a rank whose process groups are destroyed, without Python's shutdown.

    Where functional collectives were used, threads of gloo outlive the groups. One that frees a
    tensor while Python shuts down can abort the process
    (https://github.com/pytorch/pytorch/pull/179291).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def provenance() -> dict[str, object]:
    """What a result must say about itself: the command, versions, machine and threads."""
    root = pathlib.Path(__file__).resolve().parents[2]
    capabilities = torch.cpu.get_capabilities()
    bf16 = [name for name, has in capabilities.items() if "bf16" in name and has]
    machine = [platform.machine(), torch.backends.cpu.get_cpu_capability(), *bf16]
    script = str(pathlib.Path(sys.argv[0]).resolve())
    command = [_without_machine_folders(word, root) for word in (script, *sys.argv[1:])]
    return {
        "command": shlex.join(["python", *command]),
        "git": _git_hash(root),
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "python": platform.python_version(),
        "machine": ", ".join(machine),
        "threads": torch.get_num_threads(),
    }


def _without_machine_folders(argument: str, root: pathlib.Path) -> str:
    # Results are committed and must not name folders of the machine they were made on.
    if not os.path.isabs(argument):
        return argument
    path = pathlib.Path(argument).resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def _git_hash(root: pathlib.Path) -> str | None:
    """Commit of the repository, with "+" when files differ from it; None without git.

    Results do not count: runs of one commit write them one after the other.
    """
    git = ["git", "-C", str(root)]
    files = ["--", ".", ":!benchmarks/moe/results"]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True)
        status = [*git, "status", "--porcelain", *files]
        changes = subprocess.check_output(status, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("+" if changes.strip() else "")
