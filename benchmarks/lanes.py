"""Where a modelled collective spends its time: nowhere, in a thread, or on a side stream of a GPU.

Owns the order and the duration of collectives. Must not know what they compute: each is a function that fills the
outputs. A lane is a queue, as one communicator is: a collective starts when the one before it has ended and, on a GPU,
when what the caller's stream holds at that moment is done.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CALIBRATION_CYCLES = 20_000_000  # some 10 ms at 1 to 2 GHz: long beside a launch, short enough to repeat
_CALIBRATION_REPEATS = 5
_NS_PER_MS = 1e6


class Lane(Protocol):
    """A queue of collectives."""

    def start(
        self, fill: Callable[[], None], time_ns: int, moved_bytes: int, tensors: Sequence[torch.Tensor]
    ) -> dist.Work:
        """Queue one collective.

        Args:
            fill: writes the outputs; its own time is part of `time_ns`.
            time_ns: how long the collective holds the lane.
            moved_bytes: what `fill` reads and writes.
            tensors: what `fill` reads and writes; kept alive until somebody has waited.

        Returns:
            The work; `wait` on it as on that of any process group.
        """
        ...

    def close(self) -> None:
        """End what the lane started; nothing is queued afterwards."""
        ...


class Instant:
    """Collectives that take no time."""

    def start(
        self, fill: Callable[[], None], time_ns: int, moved_bytes: int, tensors: Sequence[torch.Tensor]
    ) -> dist.Work:
        fill()
        return _Done(tensors)

    def close(self) -> None:
        pass


class Thread:
    """Collectives on a thread of their own that sleeps: for the CPU, where they take no core from compute."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="modelled collectives", daemon=True)
        self._thread.start()

    def start(
        self, fill: Callable[[], None], time_ns: int, moved_bytes: int, tensors: Sequence[torch.Tensor]
    ) -> dist.Work:
        work = _AfterThread()

        def occupy() -> None:
            end = time.perf_counter_ns() + time_ns
            try:
                with torch.no_grad():
                    fill()
            except Exception as error:
                work.error = error
            time.sleep(max(0, end - time.perf_counter_ns()) / 1e9)
            work.done.set()

        self._queue.put(occupy)
        return work

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            job()


class Stream:
    """Collectives on a side stream of a GPU, each as long as a kernel that spins.

    The spinning kernel is one thread: unlike NCCL's it takes no memory bandwidth and next to nothing of the
    multiprocessors. Writing the outputs does take bandwidth, as receiving them does.

    Args:
        device: the GPU.
        bytes_per_s: device memory traffic that a copy reaches; the time of `fill` is taken off what spins.
    """

    def __init__(self, device: torch.device, bytes_per_s: int) -> None:
        self._stream = torch.cuda.Stream(device)
        self._bytes_per_s = bytes_per_s
        self.cycles_per_ns = 0.0
        self.calibrate()

    def calibrate(self) -> None:
        """Measure how long the spinning kernel takes per cycle, at the clock the GPU has now."""
        times_ms = []
        with torch.cuda.stream(self._stream):
            for _ in range(_CALIBRATION_REPEATS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                torch.cuda._sleep(_CALIBRATION_CYCLES)
                end.record()
                end.synchronize()
                times_ms.append(begin.elapsed_time(end))
        self.cycles_per_ns = _CALIBRATION_CYCLES / (statistics.median(times_ms) * _NS_PER_MS)

    def start(
        self, fill: Callable[[], None], time_ns: int, moved_bytes: int, tensors: Sequence[torch.Tensor]
    ) -> dist.Work:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            fill()
            spin_ns = time_ns - moved_bytes * 10**9 // self._bytes_per_s
            if spin_ns > 0:
                torch.cuda._sleep(round(spin_ns * self.cycles_per_ns))
            done = torch.cuda.Event()
            done.record()
        return _AfterStream(done, tensors)

    def close(self) -> None:
        self._stream.synchronize()


class _Done(dist.Work):
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """For DDP, which takes the first tensor."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _AfterThread(dist.Work):
    def __init__(self) -> None:
        super().__init__()
        self.done = threading.Event()
        self.error: Exception | None = None

    def wait(self, timeout: object = None) -> bool:
        self.done.wait()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


class _AfterStream(dist.Work):
    def __init__(self, done: torch.cuda.Event, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._done = done
        # The allocator may give their memory to the caller's stream again only once that stream has waited.
        self._tensors: Sequence[torch.Tensor] = tensors

    def wait(self, timeout: object = None) -> bool:
        torch.cuda.current_stream().wait_event(self._done)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return bool(self._done.query())
