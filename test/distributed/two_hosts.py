"""Runs torchrun on several hosts that are simulated on one machine.

A host is a network namespace with its own loopback, joined to the others by a veth
pair. So traffic between hosts crosses a network interface, and no address of one host is
reachable from another by accident. If namespaces are not permitted, a host is a
loopback address and :attr:`Cluster.reason` says why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


__all__ = ["Cluster", "Host", "two_hosts"]

# Set for all processes that a cluster starts, so that it can find and end them.
_MARK = "TORCH_TWO_HOSTS_RUN"
_INTERFACE = "veth0"
# RFC 2544 reserves 198.18.0.0/15 for tests between devices.
_ADDRESSES = ("198.18.0.1", "198.18.0.2")
_LOOPBACK = ("127.0.0.1", "127.0.0.2")
_GRACE = 5.0  # seconds for processes to end when asked to


@dataclasses.dataclass(frozen=True)
class Host:
    """One host of a :class:`Cluster`.

    Attributes:
        address (str): IPv4 address that the other host reaches it at.
        interface (str): network interface of that address.
        namespace (str, optional): network namespace; None on loopback.
    """

    address: str
    interface: str
    namespace: str | None

    def command(self, words: Sequence[str]) -> list[str]:
        """``words`` as a command that runs on this host."""
        if self.namespace is None:
            return list(words)
        return ["ip", "netns", "exec", self.namespace, *words]

    def sent_bytes(self) -> int | None:
        """Bytes sent over the interface, headers included. None on loopback."""
        if self.namespace is None:
            return None
        shown = _ip("-n", self.namespace, "-j", "-s", "link", "show", self.interface)
        return json.loads(shown)[0]["stats64"]["tx"]["bytes"]


class Cluster:
    """Two hosts, see :func:`two_hosts`.

    Attributes:
        hosts (tuple[Host, Host]): the hosts.
        reason (str, optional): why the hosts are loopback addresses; None if they are
            network namespaces.
    """

    def __init__(self, hosts: tuple[Host, Host], reason: str | None) -> None:
        self.hosts = hosts
        self.reason = reason
        self._mark = f"{_MARK}={uuid.uuid4()}"

    def describe(self) -> str:
        """One line on what the hosts are."""
        if self.reason is None:
            return "two network namespaces joined by a veth pair"
        return f"two agents on {' and '.join(_LOOPBACK)}: {self.reason}"

    def torchrun(
        self, nproc_per_node: int, arguments: Sequence[str], *, timeout: float
    ) -> str:
        """Runs ``torchrun ARGUMENTS`` with one agent per host until all have ended.

        Args:
            nproc_per_node (int): ranks on each host.
            arguments (sequence of str): script and its arguments, after options of
                torchrun if any.

        Keyword Args:
            timeout (float): seconds after which everything is ended.

        Returns:
            str: standard output and error of the first host.

        Raises:
            RuntimeError: an agent failed, or the time was over. The error has the output,
                and no process is left.
        """
        port = _free_port(self.hosts[0])
        key, value = self._mark.split("=")
        deadline = time.monotonic() + timeout
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            logs = [Path(folder, f"host{i}.log") for i in range(len(self.hosts))]
            stack.callback(self.end_processes)
            agents = []
            for i, host in enumerate(self.hosts):
                launch = ["--nnodes", str(len(self.hosts)), "--node-rank", str(i)]
                launch += ["--nproc-per-node", str(nproc_per_node)]
                launch += ["--master-addr", self.hosts[0].address]
                launch += ["--master-port", str(port), "--local-addr", host.address]
                words = [sys.executable, "-m", "torch.distributed.run", *launch]
                log = stack.enter_context(logs[i].open("w"))
                agents.append(
                    subprocess.Popen(
                        host.command([*words, *arguments]),
                        env={
                            "OMP_NUM_THREADS": "1",
                            **os.environ,
                            key: value,
                            "GLOO_SOCKET_IFNAME": host.interface,
                        },
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
            problem = _wait(agents, deadline, timeout)
            self.end_processes()
            for agent in agents:
                agent.wait()
            texts = [log.read_text(errors="replace") for log in logs]
        if problem:
            tails = (
                f"--- host {i}\n" + "\n".join(text.splitlines()[-40:])
                for i, text in enumerate(texts)
            )
            raise RuntimeError("\n".join((f"torchrun on two hosts: {problem}", *tails)))
        return texts[0]

    def processes(self) -> list[int]:
        """Ids of the processes that were started here and still run."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                # Empty for a zombie, which is a process that has ended.
                variables = (entry / "environ").read_bytes().split(b"\0")
                if self._mark.encode() in variables:
                    found.append(int(entry.name))
        return found

    def end_processes(self) -> None:
        """Ends every process that was started here: asks first, then kills."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + _GRACE
            running = self.processes()
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            while running and time.monotonic() < end:
                time.sleep(0.05)
                running = self.processes()


@contextlib.contextmanager
def two_hosts() -> Iterator[Cluster]:
    """Two hosts on this machine, gone afterwards with all their processes.

    Network namespaces need root (CAP_SYS_ADMIN and CAP_NET_ADMIN) and iproute2.

    Example::
        >>> # xdoctest: +SKIP("starts processes")
        >>> with two_hosts() as cluster:
        ...     cluster.torchrun(2, ["train.py"], timeout=60)
    """
    names = tuple(f"torch{os.getpid()}h{i}" for i in range(2))
    with contextlib.ExitStack() as stack:
        reason = _make_namespaces(names, stack)
        if reason is None:
            made = [Host(a, _INTERFACE, n) for a, n in zip(_ADDRESSES, names)]
        else:
            made = [Host(address, "lo", None) for address in _LOOPBACK]
        cluster = Cluster((made[0], made[1]), reason)
        stack.callback(cluster.end_processes)
        yield cluster


def _make_namespaces(names: Sequence[str], stack: contextlib.ExitStack) -> str | None:
    """Makes the namespaces, which ``stack`` removes. Returns why that is not possible, if so."""
    if shutil.which("ip") is None:
        return "there is no ip command (iproute2)"
    try:
        _remove_stale()
        with contextlib.ExitStack() as undo:
            for name in names:
                _ip("netns", "add", name)
                undo.callback(_ip, "netns", "del", name)
            # Both ends go with their namespaces.
            ends = [["name", _INTERFACE, "netns", name] for name in names]
            _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for name, address in zip(names, _ADDRESSES):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", _INTERFACE)
                for device in ("lo", _INTERFACE):
                    _ip("-n", name, "link", "set", device, "up")
                _ip("netns", "exec", name, "true")
            stack.push(undo.pop_all())
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"network namespaces are not permitted: {said.strip()}"
    return None


def _remove_stale() -> None:
    """Removes namespaces of processes that were killed before they could do it."""
    for line in _ip("netns", "list").splitlines():
        match = re.match(r"torch(\d+)h\d\b", line)
        if match and not Path("/proc", match[1]).exists():
            _ip("netns", "del", match[0])


def _ip(*words: str) -> str:
    done = subprocess.run(
        ["ip", *words], check=True, capture_output=True, text=True, timeout=30
    )
    return done.stdout


def _free_port(host: Host) -> int:
    """A port that nobody listens on: any one in a namespace of our own."""
    if host.namespace is not None:
        return 29500
    with socket.socket() as probe:
        probe.bind((host.address, 0))
        return probe.getsockname()[1]


def _wait(
    agents: Sequence[subprocess.Popen], deadline: float, timeout: float
) -> str | None:
    """Waits until all agents succeed, one fails, or time is over. Returns what went wrong."""
    while time.monotonic() < deadline:
        codes = [agent.poll() for agent in agents]
        for i, code in enumerate(codes):
            if code:
                return f"the agent of host {i} ended with status {code}"
        if None not in codes:
            return None
        time.sleep(0.05)
    return f"not done after {timeout:g} seconds"
