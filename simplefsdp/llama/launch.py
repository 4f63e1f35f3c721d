"""Starts the ranks of a run on this machine and answers for them.

Owns: how many processes, their environment, forwarding of signals, what is shown of their output, the exit
code. Must not know: what the ranks compute. On a machine without a GPU driver it imports no torch, so that
it costs a CPU run nothing.

    simplefsdp train            this process: parse, check, start, wait
        rank 0                  writes to the terminal itself
        rank 1 ..               stdout dropped; stderr kept and shown if the rank fails

The rendezvous has no race for a free port: the launcher binds the socket, and rank 0 inherits it and
listens on it. Ranks also inherit the read end of a pipe that nobody writes to: when it closes, the launcher
is gone, however it ended, and they save and stop instead of training on unseen.
"""

from __future__ import annotations

import collections
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO, Any

from simplefsdp.llama.options import TrainOptions, UsageError

LISTEN_FD_VARIABLE = "SIMPLEFSDP_LISTEN_FD"
LIFELINE_FD_VARIABLE = "SIMPLEFSDP_LIFELINE_FD"

DEFAULT_CPU_RANKS = 2
POLL_INTERVAL_S = 0.05
FAILURE_GRACE_S = 60.0
"""How long ranks may go on after one failed: to notice, to say so, to let a checkpoint finish."""
STDERR_TAIL_LINES = 40
LISTEN_BACKLOG = 512
GPU_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""NVIDIA's driver, the same inside WSL, and AMD's; with none of them torch need not be asked."""


def find_device_type(device: str) -> str:
    """Resolves `--device`: "cpu" or "cuda".

    Raises:
        UsageError: if "cuda" is asked for and there is no usable GPU.
    """
    if device == "cpu" or (device == "auto" and not any(map(os.path.exists, GPU_DRIVER_FILES))):
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise UsageError("--device cuda: torch finds no usable GPU here; use --device cpu")
    return "cpu"


def find_world_size(options: TrainOptions) -> int:
    """Returns how many ranks to start.

    Raises:
        UsageError: if there are fewer GPUs than `--nproc`, or `--sharding-factor` does not divide the ranks.
    """
    if find_device_type(options.device) == "cuda":
        import torch

        gpus = torch.cuda.device_count()
        world_size = options.nproc or gpus
        if world_size > gpus:
            raise UsageError(f"--nproc {world_size}: only {gpus} GPUs here, and each rank needs its own")
    else:
        world_size = options.nproc or DEFAULT_CPU_RANKS
    check_sharding_factor(options, world_size)
    return world_size


def check_sharding_factor(options: TrainOptions, world_size: int) -> None:
    """Raises UsageError unless `--sharding-factor` divides the number of ranks."""
    factor = options.sharding_factor
    if factor is not None and world_size % factor:
        divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise UsageError(
            f"--sharding-factor {factor}: must divide the {world_size} ranks, so one of {', '.join(divisors)}"
        )


def check_cpp_compiler(options: TrainOptions) -> None:
    """Raises UsageError if the CPU's code cannot be compiled on this machine."""
    if (
        not (options.compile and options.compile_backend == "inductor")
        or find_device_type(options.device) != "cpu"
    ):
        return
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler.split()[0]) is None:
        raise UsageError(
            f"torch.compile needs a C++ compiler on CPUs, and there is no {compiler}: install it, or use --no-compile"
        )
    headers = pathlib.Path(sysconfig.get_path("include"), "Python.h")
    if not headers.exists():
        raise UsageError(
            f"torch.compile needs Python's headers on CPUs, and there is no {headers}: install them (Debian: "
            "python3-dev), or use --no-compile"
        )


def launch(argv: Sequence[str], options: TrainOptions) -> int:
    """Runs `simplefsdp.llama.train` on every rank of this machine and waits for the end.

    Args:
        argv: the options as given on the command line; the ranks parse them again.
        options: the same, parsed.

    Returns:
        0 if every rank succeeded, 2 if a rank reported bad input, else the code of the rank that failed first
        (128 + n for signal n).

    Raises:
        UsageError: if this machine cannot do what is asked for.
    """
    check_cpp_compiler(options)
    command = [sys.executable, "-m", "simplefsdp.llama.train", *argv]
    is_cpu = find_device_type(options.device) == "cpu"
    with RankProcesses(command, find_world_size(options), cpu=is_cpu) as ranks:
        return ranks.wait()


class RankProcesses:
    """The processes of one run, started by constructing. A context manager: none of them outlives it.

    Args:
        command: what each rank runs; it learns its rank from the environment, as under torchrun.
        world_size: number of ranks.
        cpu: whether they compute on the CPU.
        failure_grace_s: how long the others may go on after a rank failed.
    """

    def __init__(
        self, command: Sequence[str], world_size: int, *, cpu: bool, failure_grace_s: float = FAILURE_GRACE_S
    ) -> None:
        self._failure_grace_s = failure_grace_s
        self._processes: list[subprocess.Popen[str]] = []
        self._tails: list[collections.deque[str]] = []
        self._readers: list[threading.Thread] = []
        self._handlers: dict[int, object] = {}
        listener = socket.create_server(("127.0.0.1", 0), backlog=LISTEN_BACKLOG)
        lifeline, self._lifeline_end = os.pipe()
        try:
            for rank in range(world_size):
                environment = _environment(rank, world_size, listener.getsockname()[1], cpu=cpu)
                environment[LIFELINE_FD_VARIABLE] = str(lifeline)
                inherited = [lifeline]
                if rank == 0:
                    environment[LISTEN_FD_VARIABLE] = str(listener.fileno())
                    inherited.append(listener.fileno())
                # A session of its own: Ctrl-C in a terminal reaches the launcher alone, which forwards it.
                process = subprocess.Popen(
                    command,
                    env=environment,
                    pass_fds=inherited,
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                    stderr=None if rank == 0 else subprocess.PIPE,
                    text=True,
                    errors="replace",
                )
                self._processes.append(process)
                self._keep_tail(process.stderr)
        except BaseException:
            self.__exit__()
            raise
        finally:
            listener.close()
            os.close(lifeline)
        # Not before all ranks run: until here a signal ends the launcher, and the lifeline ends the ranks.
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, self._forward)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        os.close(self._lifeline_end)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def wait(self) -> int:
        """Waits until every rank has ended, kills those that hang on after a failure, and shows why they failed.

        Returns:
            The run's exit code, see `launch`.
        """
        first_failure: int | None = None
        deadline = float("inf")
        running = set(range(len(self._processes)))
        while running:
            for rank in sorted(running):
                code = self._processes[rank].poll()
                if code is None:
                    continue
                running.discard(rank)
                if code != 0 and first_failure is None:
                    first_failure = rank
                    deadline = time.monotonic() + self._failure_grace_s
                    if code < 0:
                        _say(f"rank {rank} was killed by {signal.Signals(-code).name}")
            if running and time.monotonic() > deadline:
                _say(f"rank {first_failure} failed; killing rank {', '.join(map(str, sorted(running)))}")
                for rank in running:
                    self._processes[rank].kill()
                deadline = float("inf")
            time.sleep(POLL_INTERVAL_S)
        self._show_tails()
        codes = [process.returncode for process in self._processes]
        if 2 in codes:
            return 2
        if first_failure is None:
            return 0
        code = codes[first_failure]
        return code if code > 0 else 128 - code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _keep_tail(self, stream: IO[str] | None) -> None:
        tail: collections.deque[str] = collections.deque(maxlen=STDERR_TAIL_LINES)
        self._tails.append(tail)
        if stream is not None:
            reader = threading.Thread(target=lambda: tail.extend(stream), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _show_tails(self) -> None:
        for reader in self._readers:
            reader.join(timeout=1.0)
        for rank, (process, tail) in enumerate(zip(self._processes, self._tails, strict=True)):
            if process.returncode != 0:
                for line in tail:
                    # What watches over ranks, and torch, name the rank themselves.
                    sys.stderr.write(line if line.startswith("[rank") else f"[rank {rank}] {line}")
        sys.stderr.flush()


def _environment(rank: int, world_size: int, port: int, *, cpu: bool) -> dict[str, str]:
    """The variables torchrun would set, and what one machine without GPUs needs."""
    environment = dict(os.environ)
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if cpu:
        # Ranks share the cores; more threads than cores makes every one of them slower.
        environment.setdefault("OMP_NUM_THREADS", "1")
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        if loopback:
            # All ranks are here, and a host name that resolves to nothing reachable must not matter.
            environment.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    return environment


def _say(message: str) -> None:
    print(f"simplefsdp: {message}", file=sys.stderr, flush=True)


def is_launched() -> bool:
    """Whether our launcher started this process, rather than torchrun or the like."""
    return LIFELINE_FD_VARIABLE in os.environ


def open_rendezvous(rank: int, world_size: int, timeout_s: float) -> Any:
    """Opens the key-value store of a launched run.

    Args:
        rank: this rank.
        world_size: ranks in all.
        timeout_s: how long to wait for the others.

    Returns:
        A `torch.distributed.TCPStore`, served by rank 0 on the socket the launcher bound.
    """
    from datetime import timedelta

    import torch.distributed as dist

    descriptor = os.environ.pop(LISTEN_FD_VARIABLE, None)
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=int(descriptor) if descriptor is not None else None,
    )


def watch_launcher() -> None:
    """Makes this rank stop as on SIGTERM when the launcher that started it is gone."""
    if not is_launched():
        return
    descriptor = int(os.environ[LIFELINE_FD_VARIABLE])

    def wait_for_the_end() -> None:
        os.read(descriptor, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_the_end, daemon=True, name="launcher lifeline").start()
