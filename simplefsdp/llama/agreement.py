"""Running functions on the ranks of a group so that all ranks agree on whether they failed.

Owns: collecting results and errors across ranks. Must not know: what the functions do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")


class AgreedError(RuntimeError):
    """An error whose one-line message is meant for the user and reaches the other ranks unchanged."""


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    value: T | None
    error: AgreedError | None


class Ranks:
    """The ranks of a process group with a CPU backend. All methods but `share` are collective.

    Args:
        group: None for the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's part of work that any rank can do."""
        return items[self.rank :: self.size]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def first(self, function: Callable[[], T]) -> T:
        """Run a function on the group's first rank; every rank gets its result or raises its error."""
        box = [self._attempt(function) if self.rank == 0 else None]
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.broadcast_object_list(box, src=source, group=self.group)
        outcome = cast("_Outcome[T]", box[0])
        if outcome.error is not None:
            raise outcome.error
        return cast(T, outcome.value)

    def each(self, function: Callable[[], T]) -> T:
        """Run a function on every rank and return this rank's result; if it fails on one rank, all raise."""
        outcome = self._attempt(function)
        for error in self.gather(outcome.error):
            if error is not None:
                raise error
        return cast(T, outcome.value)

    def _attempt(self, function: Callable[[], T]) -> _Outcome[T]:
        try:
            return _Outcome(function(), None)
        except AgreedError as error:
            return _Outcome(None, error)
        except Exception as error:  # may not be picklable: every rank gets its text
            return _Outcome(None, AgreedError(f"rank {self.rank}: {one_line(error)}"))


def one_line(error: BaseException) -> str:
    """Return type and first line of an error, or of the first rank's error where DCP collected several."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank}: {one_line(cause)}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    if isinstance(error, AgreedError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
