"""An emulated cluster on one machine: ranks in network namespaces, joined by a bridge, each uplink rate-limited.

Owns namespaces, rate limits and the processes of the ranks. Must not know what the ranks do.

    with open_bed(ranks=2, rate="1gbit") as bed:
        bed.run(["python", "-m", "benchmarks.train_step", "--worker"], timeout_s=600)

Each rank's uplink is shaped by a token bucket; with more than two ranks the link from the bridge to each rank as well,
because several senders would otherwise share one receiver for free. There is no added latency: kernels often lack
netem. TCP runs reno without slow start after idle: the default ramps down between collectives. Packets are jumbo
frames: fewer of them take less of the processor from compute. The bucket holds little: what it has saved up while the
link was idle goes through at once, so a large one makes a slow network of small messages with pauses a fast one.

Everything lives in namespaces of this process's own name and goes with them: at the end, on an exception, on SIGTERM or
SIGHUP. Ranks end with this process however it ends; after a SIGKILL the next bed removes the namespaces. Needs root,
`ip` and `tc` (Debian: iproute2).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PREFIX = "sfsdp"
_NETWORK = "10.77.0"
_QUEUE = "4mb"
_MTU = 9000
_BURST_S = 0.5e-3
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SYSCTLS = (
    "net.ipv4.tcp_congestion_control=reno",
    "net.ipv4.tcp_slow_start_after_idle=0",
    "net.ipv4.tcp_wmem=4096 1048576 16777216",
    "net.ipv4.tcp_rmem=4096 1048576 16777216",
    "net.ipv4.tcp_no_metrics_save=1",
)
_POLL_S = 0.05
_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1
"""`prctl`: the signal that a process gets when its parent is gone (linux/prctl.h)."""


class RankFailure(RuntimeError):
    """A rank ended with an error; the text names it."""


class Bed:
    """Ranks on loopback: what every bed does, without a network of its own.

    Args:
        ranks: how many.

    Attributes:
        description: the network, for the record of a result.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.description = "loopback, no rate limit"
        self._address = "127.0.0.1"
        self._interface = "lo"

    def close(self) -> None:
        """Remove what the bed made."""

    def result(self, command: Sequence[str], timeout_s: float) -> Any:
        """Run a command once per rank, as `run` does; returns the last line that rank 0 wrote, read as JSON."""
        return json.loads(self.run(command, timeout_s).strip().splitlines()[-1])

    def run(self, command: Sequence[str], timeout_s: float) -> str:
        """Run a command once per rank, with torch.distributed's environment.

        Args:
            command: program and arguments, the same for every rank.
            timeout_s: seconds after which the ranks are ended.

        Returns:
            What rank 0 wrote to its standard output. Standard error goes to this process's own.

        Raises:
            RankFailure: a rank failed or the time was up; the other ranks are ended first.
        """
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self._address,
            "MASTER_PORT": str(_free_port()),
            "GLOO_SOCKET_IFNAME": self._interface,
        }
        with tempfile.TemporaryFile("w+") as written:
            processes = [
                subprocess.Popen(
                    [*self._enter(rank), *command],
                    stdout=written if rank == 0 else subprocess.DEVNULL,
                    preexec_fn=_end_with_parent,
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
                for rank in range(self.ranks)
            ]
            try:
                failure = _wait(processes, timeout_s)
            finally:
                _end(processes)
            written.seek(0)
            text = written.read()
        if failure:
            raise RankFailure(f"{failure}\n{text}")
        return text

    def _enter(self, rank: int) -> list[str]:
        return []


class NetBed(Bed):
    """Ranks in network namespaces with a rate limit.

    Args:
        ranks: how many, 2 to 250.
        rate: bits per second of each link: "1gbit", "500mbit".
    """

    def __init__(self, ranks: int, rate: str) -> None:
        super().__init__(ranks)
        self.description = f"{ranks} network namespaces, {rate} per link each way, TCP reno"
        self._address = f"{_NETWORK}.1"
        self._interface = "net0"
        self._name = f"{_PREFIX}{os.getpid()}"
        remove_stale()
        try:
            self._build(rate)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for name in _namespaces():
            if name.startswith(f"{self._name}-"):
                _call("ip", "netns", "del", name)

    def _build(self, rate: str) -> None:
        switch = f"{self._name}-switch"
        _call("ip", "netns", "add", switch)
        _call("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _call("ip", "-n", switch, "link", "set", "br0", "up")
        for rank in range(self.ranks):
            name, port = f"{self._name}-{rank}", f"port{rank}"
            _call("ip", "netns", "add", name)
            _call("ip", "-n", name, "link", "set", "lo", "up")
            _call(
                *("ip", "-n", switch, "link", "add", port, "type", "veth"),
                *("peer", "name", self._interface, "netns", name),
            )
            _call("ip", "-n", switch, "link", "set", port, "mtu", str(_MTU), "master", "br0", "up")
            _call("ip", "-n", name, "addr", "add", f"{_NETWORK}.{rank + 1}/24", "dev", self._interface)
            _call("ip", "-n", name, "link", "set", self._interface, "mtu", str(_MTU), "up")
            for setting in _SYSCTLS:
                _call("ip", "netns", "exec", name, "sysctl", "-qw", setting)
            _limit(name, self._interface, rate)
            if self.ranks > 2:
                _limit(switch, port, rate)

    def _enter(self, rank: int) -> list[str]:
        return ["ip", "netns", "exec", f"{self._name}-{rank}"]


@contextlib.contextmanager
def open_bed(ranks: int, rate: str | None) -> Iterator[Bed]:
    """Make a bed, and remove it whatever happens.

    Args:
        ranks: how many.
        rate: bits per second of each link, "500mbit"; None asks for loopback. Where namespaces cannot be made the
            reason is printed and loopback serves.

    Raises:
        ValueError: a rate that cannot be read.
    """
    if rate is not None:
        burst_bytes(rate)
    reason = why_not() if rate is not None else None
    if reason is not None:
        print(f"no emulated network: {reason}; using loopback")
    with _leave_on_signals():
        bed = Bed(ranks) if rate is None or reason is not None else NetBed(ranks, rate)
        try:
            yield bed
        finally:
            bed.close()


def why_not() -> str | None:
    """Why this process cannot make network namespaces; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "sysctl") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (Debian: iproute2, procps)"
    probe = subprocess.run(
        ["ip", "netns", "add", f"{_PREFIX}{os.getpid()}-probe"], capture_output=True, text=True
    )
    if probe.returncode:
        return f"ip netns add: {probe.stderr.strip()}"
    _call("ip", "netns", "del", f"{_PREFIX}{os.getpid()}-probe")
    return None


def remove_stale() -> None:
    """Remove namespaces of beds whose process is gone."""
    for name in _namespaces():
        match = re.fullmatch(rf"{_PREFIX}(\d+)-\w+", name)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            for process in _call("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            _call("ip", "netns", "del", name)


def rate_argument(text: str) -> str:
    """For argparse: a rate that can be read."""
    try:
        burst_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def burst_bytes(rate: str) -> int:
    """What a link may send at once after it was idle: half a millisecond's bytes, but two packets at least.

    Raises:
        ValueError: a rate that cannot be read.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"a rate is a number and kbit, mbit or gbit, such as 500mbit; got {rate!r}")
    return max(2 * _MTU, round(float(found[1]) * _UNITS[found[2]] / 8 * _BURST_S))


def _namespaces() -> list[str]:
    lines = _call("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.strip()]


def _limit(namespace: str, interface: str, rate: str) -> None:
    _call(
        *("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf"),
        *("rate", rate, "burst", str(burst_bytes(rate)), "limit", _QUEUE),
    )


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def _leave_on_signals() -> Iterator[None]:
    """Have the signals that end a process raise SystemExit, so that everything is cleaned up; SIGINT raises anyhow."""
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


def _end_with_parent() -> None:
    """In a rank before its program starts: be killed when this process is gone, however it went (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> str:
    """Wait for all processes, or the first failure; what went wrong, empty for nothing."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            return f"rank {failed[0][0]} ended with exit code {failed[0][1]}"
        if None not in codes:
            return ""
        if time.monotonic() > deadline:
            who = f"{codes.count(None)} of {len(codes)} ranks" if len(codes) > 1 else "it"
            return f"{who} still ran after {timeout_s:.0f} s"
        time.sleep(_POLL_S)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
