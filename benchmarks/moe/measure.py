"""How every MoE benchmark measures: one clock, one meter of saved and one of peak bytes, one JSON.

A module of the other benchmarks, without a command line: only :func:`on_hosts` runs it, as a rank.

torch.utils.benchmark times one function after another, so other jobs on the machine may slow one
of them and not its peer. Here all functions take turns in every round, and ratios are of one round.
"""

import datetime
import functools
import gc
import importlib
import itertools
import json
import math
import os
import pathlib
import pickle
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor


MIN_ROUNDS = 3
RANK_TIMEOUT = datetime.timedelta(seconds=120)  # of a collective, so that nothing hangs
HOSTS_TIMEOUT = 1200  # seconds of all ranks
# About a millisecond of a GPU: longer than the host needs to queue a call.
_QUEUE_CYCLES = 2_000_000


class Spread(NamedTuple):
    """Median and the 10th and 90th percentile."""

    median: float
    p10: float
    p90: float


def spread(values: Iterable[float]) -> Spread:
    values = list(values)
    if len(values) == 1:
        return Spread(*values * 3)
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(deciles[4], deciles[0], deciles[8])


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Low and high end of a confidence interval of the median, and its confidence.

    Order statistics are exact for any distribution. The interval is the narrowest with at least
    95 %, or has all values if they are too few.
    """
    ordered, n = sorted(values), len(values)
    best = (ordered[0], ordered[-1], 1 - 2**-n * 2)
    for cut in range(1, n // 2):
        tail = sum(math.comb(n, i) for i in range(cut + 1)) / 2**n
        if 1 - 2 * tail < 0.95:
            break
        best = (ordered[cut], ordered[-1 - cut], 1 - 2 * tail)
    return best


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Ratios of the rounds that both have."""
    return spread([a / b for a, b in zip(numerator, denominator)])


def ratio_record(peer: Sequence[float], ours: Sequence[float]) -> dict[str, object]:
    """A peer's times over ours for a results file: spread, interval, confidence."""
    *interval, confidence = median_interval([a / b for a, b in zip(peer, ours)])
    ends = {"interval": interval, "confidence": confidence}
    return paired_ratio(peer, ours)._asdict() | ends


def timed(
    function: Callable[[], object],
    device: torch.device | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of one call; on CUDA those between two events.

    The device is kept busy until the host has queued the call, so that its time
    does not include the launch, unless the call waits for the device.
    """
    if device is None or device.type != "cuda":
        start = clock()
        function()
        return clock() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_QUEUE_CYCLES)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end)


def interleaved_seconds(
    functions: Mapping[Any, Callable[[], object]],
    *,
    rounds: int | Mapping[Any, int],
    warmup: int = 3,
    on_round: Callable[[int], object] = lambda i: None,
    before: Callable[[], object] = lambda: None,
    device: torch.device | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Any, list[float]]:
    """Time every function once per round, so that drift of the machine affects all alike.

    The order within a round rotates. Entry i of every list is from round i, so two lists may be
    compared pairwise.

    Args:
        rounds: for all functions, or one number each; a function with fewer runs in the first ones.
        before: called before every call, outside its time.
        clock: of a CPU; time.thread_time for one thread on a machine that others use.
    """
    limits = rounds if isinstance(rounds, Mapping) else dict.fromkeys(functions, rounds)
    seconds: dict[Any, list[float]] = {name: [] for name in functions}
    for i in range(warmup + max(limits.values())):
        on_round(i)
        names = [name for name in functions if i < warmup + limits[name]]
        first = i % len(names)
        for name in names[first:] + names[:first]:
            before()
            value = timed(functions[name], device, clock)
            if i >= warmup:
                seconds[name].append(value)
    return seconds


def affordable_rounds(rounds: int, seconds: float, budget: float) -> int:
    """As many of ``rounds`` as fit into ``budget`` if one takes ``seconds``; at least a few."""
    return max(min(MIN_ROUNDS, rounds), min(rounds, int(budget / max(seconds, 1e-6))))


def saved_bytes(forward: Callable[[], object], parameters: Iterable[Tensor]) -> int:
    """Bytes that ``forward``, eager or compiled, keeps alive for its backward.

    It counts whole storages, each once, as a saved view keeps its storage alive. Storages of
    ``parameters`` do not count.
    """
    excluded = {p.untyped_storage().data_ptr() for p in parameters}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        # Holding the storage keeps its address from being reused.
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

    The allocator events of torch.profiler include every allocation through c10, also temporary
    ones, but not the scratch memory that a BLAS library allocates itself. On CUDA they are those
    of the caching allocator.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    from torch._C._profiler import _EventType
    from torch.profiler import profile, ProfilerActivity
    from torch.profiler._utils import traverse_dfs

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it reports a missing GPU
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        function()
    events = traverse_dfs(prof.profiler.kineto_results.experimental_event_tree())
    sizes = sorted(
        (event.start_time_ns, i, event.extra_fields.alloc_size)  # negative when freed
        for i, event in enumerate(events)
        if event.tag == _EventType.Allocation
    )
    return max(itertools.accumulate((size for *_, size in sizes), initial=0))


def on_gloo_ranks(ranks: int, function: Callable[..., object], *args: object) -> list:
    """Results of ``function(*args)``, passed as JSON, on each of ``ranks`` ranks of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_spawned_rank, (ranks, folder, function, args), nprocs=ranks)
        return _returned(folder, ranks)


def on_hosts(cluster: Any, ranks_per_host: int, function: Callable, *args: Any) -> list:
    """The same on the hosts of test/distributed/two_hosts.py, with torchrun.

    ``function`` is defined in the running script, or in a module beside it.
    """
    script = function.__module__ == "__main__"
    module = pathlib.Path(sys.argv[0]).stem if script else function.__module__
    call = pickle.dumps((module, function.__qualname__, args))
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "call").write_bytes(call)
        cluster.torchrun(ranks_per_host, [__file__, folder], timeout=HOSTS_TIMEOUT)
        return _returned(folder, ranks_per_host * len(cluster.hosts))


def _returned(folder: str, ranks: int) -> list:
    files = (pathlib.Path(folder, f"{rank}.json") for rank in range(ranks))
    return [json.loads(file.read_text()) for file in files]


def _spawned_rank(rank: int, ranks: int, folder: str, *call: Any) -> None:
    options = {"init_method": f"file://{folder}/store", "rank": rank}
    _run_rank(folder, *call, world_size=ranks, **options)


def _run_rank(folder: str, function: Callable, args: tuple, **group: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=RANK_TIMEOUT, **group)
    returned = json.dumps(function(*args))
    pathlib.Path(folder, f"{dist.get_rank()}.json").write_text(returned)
    dist.barrier()
    leave_groups()


def leave_groups() -> None:
    """Destroys the process groups, also those of a model under FSDP2, which reference cycles hold.

    A group's thread that still runs at Python's shutdown can abort the process
    (https://github.com/pytorch/pytorch/pull/179291).
    """
    gc.collect()
    dist.destroy_process_group()


def over_ranks(values: Sequence[float], op: object = None) -> list[float]:
    """The largest of all ranks, or another reduction."""
    reduced = torch.as_tensor(values, dtype=torch.float64).clone()
    dist.all_reduce(reduced, op or dist.ReduceOp.MAX)
    return reduced.tolist()


def slowest_seconds(functions: Mapping[Any, Callable], **options: Any) -> dict:
    """:func:`interleaved_seconds` after barriers; the slowest rank of every round."""
    seconds = interleaved_seconds(functions, before=dist.barrier, **options)
    return {name: over_ranks(values) for name, values in seconds.items()}


@functools.cache  # a file that a run wrote would change the state of git
def provenance() -> dict[str, object]:
    """Where a result comes from: command, date, versions, machine and threads."""
    root = pathlib.Path(__file__).resolve().parents[2]
    capabilities = torch.cpu.get_capabilities()
    bf16 = [name for name, has in capabilities.items() if "bf16" in name and has]
    machine = [platform.machine(), torch.backends.cpu.get_cpu_capability(), *bf16]
    script = str(pathlib.Path(sys.argv[0]).resolve())
    command = [_without_machine_folders(word, root) for word in (script, *sys.argv[1:])]
    return {
        "command": shlex.join(["python", *command]),
        "date": datetime.date.today().isoformat(),
        "git": _git_hash(root),
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "python": platform.python_version(),
        "machine": ", ".join(machine),
        "threads": torch.get_num_threads(),
    }


def _without_machine_folders(argument: str, root: pathlib.Path) -> str:
    # Results are committed and must not name folders of this machine.
    if not os.path.isabs(argument):
        return argument
    path = pathlib.Path(argument).resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def _git_hash(root: pathlib.Path) -> str | None:
    """Commit of the repository, with "+" when files differ from it; None without git.

    Results are ignored, as runs of one commit write them one after the other.
    """
    files = ["--", ".", ":!benchmarks/moe/results"]
    try:
        commit, changes = (
            subprocess.check_output(["git", "-C", str(root), *words], text=True).strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", *files])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changes else "")


def _plain(value: object) -> object:
    """Rounds to seven digits, more than any measurement has; spreads become objects."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Spread):
        return _plain(value._asdict())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def save(path: pathlib.Path | None, **fields: object) -> None:
    """Writes the fields and their provenance; nothing without a path."""
    if path is not None:
        write_json(provenance() | fields, path)


def write_json(fields: Mapping[str, object], path: pathlib.Path) -> None:
    """Writes rounded numbers, with every list of numbers on one line, atomically."""

    def one_line(numbers: re.Match[str]) -> str:
        return " ".join(numbers[0].split()).replace("[ ", "[")

    lines = json.dumps(_plain(fields), indent=1)
    lines = re.sub(r"\[[-+.\deE,\s]+\]", one_line, lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, lines + "\n")


def replace_text(path: pathlib.Path, text: str) -> None:
    """Writes a file whole or not at all."""
    part = path.with_name(path.name + ".part")  # in its folder: one rename
    try:
        part.write_text(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":  # a rank of on_hosts
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
    _folder = pathlib.Path(*sys.argv[1:2])
    if not (_folder / "call").exists():
        print(
            "measure.py: a module, without a command line of its own", file=sys.stderr
        )
        sys.exit(2)
    _module, _name, _args = pickle.loads((_folder / "call").read_bytes())
    _run_rank(sys.argv[1], getattr(importlib.import_module(_module), _name), _args)
