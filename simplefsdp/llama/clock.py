"""Times steps without measuring what is not a step.

Owns: step times and their interruptions. Must not know: what a step does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class StepClock:
    """Times from the end of one step to the end of the next.

    Args:
        synchronize: waits for everything issued to the device. Called where the clock starts and around what it
            leaves out, never in a lap: the caller laps at a moment at which it has waited for the device anyway.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._mark = 0.0

    def start(self) -> None:
        """The first step begins."""
        self._synchronize()
        self._mark = time.perf_counter()

    def lap(self) -> float:
        """A step has ended; returns how many seconds it took."""
        now = time.perf_counter()
        elapsed, self._mark = now - self._mark, now
        return elapsed

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Leaves out of the next lap what runs inside."""
        self._synchronize()
        began = time.perf_counter()
        yield
        self._synchronize()
        self._mark += time.perf_counter() - began
