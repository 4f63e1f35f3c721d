"""Ending a process: when asked to, in agreement with the other ranks, or at once.

Owns: the handlers of SIGTERM and SIGINT while a run is under way, and leaving a process whose main thread may be
stuck. Must not know: what the run does before it ends.

[Note: a thread, not a handler] Python runs signal handlers on the main thread, between two of its instructions. A
main thread inside a collective that never returns runs none. The interpreter's wake-up file descriptor is
written by the operating system's handler itself, so a thread that reads it learns of every signal.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# A shell's convention for "ended by signal n".
SIGNAL_EXIT_BASE = 128
# Longest time that leaving at once may take to write out what the process has printed.
FLUSH_TIMEOUT_S = 1.0


class GracefulShutdown:
    """Turns the first SIGTERM or SIGINT into a request that the training loop asks for; the second ends at once.

    A context manager for the main thread. Signals within `merge_s` of the first are the same request: in a
    terminal, Ctrl-C reaches the ranks and their launcher, and the launcher passes it on.

    Args:
        process_group: group with a CPU backend for `should_stop`; None makes a gloo group over all ranks at
            the first call, or uses none if torch.distributed is not initialised.
        signals: the signals to handle.
        merge_s: seconds.
    """

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
        merge_s: float = 1.0,
    ) -> None:
        self._group = process_group
        self._signals = tuple(signals)
        self._merge_s = merge_s
        self._request: signal.Signals | None = None
        self._agreed = False
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_fd = -1
        self._wakeup: socket.socket | None = None

    @property
    def requested(self) -> bool:
        """Whether this process has been asked to stop. Other ranks may not have been, or not yet."""
        return self._request is not None

    def should_stop(self) -> bool:
        """Return whether any rank has been asked to stop: the same answer on all ranks.

        Collective: one all-reduce of one number on the CPU. Once true, it stays so.
        """
        if self._agreed or not dist.is_initialized():
            return self._agreed or self.requested
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        asked = torch.tensor([int(self.requested)])
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._group)
        self._agreed = bool(asked.item())
        return self._agreed

    def __enter__(self) -> GracefulShutdown:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("GracefulShutdown must be entered on the main thread: Python allows no other")
        reader, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        for number in self._signals:
            self._previous[number] = signal.signal(number, _do_nothing)
        # What is sent to a forked child (a data loader's worker) is not meant for this process.
        os.register_at_fork(after_in_child=functools.partial(_restore_in_child, weakref.ref(self)))
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._wakeup is None:
            return
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._wakeup.close()  # ends the thread
        self._wakeup = None

    def _watch(self, reader: socket.socket) -> None:
        first_at = 0.0
        with reader:
            while byte := reader.recv(1):
                if byte[0] not in self._signals:
                    continue
                number = signal.Signals(byte[0])
                if self._request is None:
                    first_at = time.monotonic()
                    self._request = number
                    if os.environ.get("RANK", "0") == "0":
                        say(f"{number.name}: stopping after this step; send it again to stop at once")
                elif time.monotonic() - first_at > self._merge_s:
                    say(f"{number.name} again: stopping at once")
                    exit_now(SIGNAL_EXIT_BASE + number)


def say(line: str) -> None:
    """Write one line to standard error, past Python's buffers and locks, which a stuck thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="replace"))


def exit_now(code: int) -> NoReturn:
    """End the process from any thread, whatever its other threads are doing.

    Args:
        code: exit code.
    """
    # In a thread of its own, because the stuck main thread may be holding a stream's lock.
    flusher = threading.Thread(target=_flush, daemon=True)
    with contextlib.suppress(RuntimeError):  # Python 3.12 and later start no thread once the interpreter ends
        flusher.start()
        flusher.join(FLUSH_TIMEOUT_S)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _restore_in_child(reference: weakref.ref[GracefulShutdown]) -> None:
    shutdown = reference()
    if shutdown is not None:
        shutdown._restore()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler has to be there for the wake-up file descriptor to be written."""
