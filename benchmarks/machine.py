"""What a run measures of the machine itself: how much of it a step keeps busy, and what a lone collective takes.

Owns these measurements and what follows from them. Must not know contestants or schedules.

Ranks of one machine share its cores with the threads and the kernel code that communicate, so compute is slower while
communication runs. On a cluster the network cards do that work; there the pace is 1.

A profile has the time that a collective adds to a queue. gloo shakes hands before it sends: where nothing else is in
flight, the link stands still meanwhile, and a large gather takes half as long again.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchmarks.names import COMMUNICATION, COMPUTE, EAGER_COMPUTE, OPTIMIZER
from inductor_passes.costs.measure import EFFORTS, collective_times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LONE_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_LONE_EFFORT = dataclasses.replace(
    EFFORTS["cpu"], repeats=3, warmups=1, payload_bytes=tuple(1 << power for power in (16, 18, 20, 22, 24))
)
_LEAST_PACE = 0.1
"""Compute never stops: the scheduler of the operating system gives every thread its turn."""
_IDLE_FIELDS = (3, 4)
"""Of /proc/stat: idle, and waiting for storage."""
_GUEST_FIELDS = 8
"""Of /proc/stat: what follows is counted before, too."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a run measured of the machine itself.

    Args:
        compute_s: seconds of forward and backward without communication or optimizer.
        eager_s: the same, not compiled.
        optimizer_s: seconds of the optimizer.
        pace: speed of compute while communication runs, as a part of its speed alone.
        floor_s: seconds of a step that kept all cores busy all the time.
        lone: by kind, bytes and ns of a collective with nothing else in flight, in ascending order.
    """

    compute_s: float
    eager_s: float
    optimizer_s: float
    pace: float = 1.0
    floor_s: float = 0.0
    lone: Mapping[str, Sequence[tuple[int, int]]] = dataclasses.field(default_factory=dict)

    def lone_ns(self, kind: str, size_bytes: int) -> int:
        """Time of a collective with nothing else in flight, between and beyond the measured sizes on straight lines.

        Args:
            kind: of the collective.
            size_bytes: its full payload.

        Returns:
            Nanoseconds; 0 for a kind that was not measured.
        """
        points = self.lone.get(kind, ())
        if len(points) < 2:
            return 0
        if size_bytes <= points[0][0]:
            return points[0][1]
        above = next((at for at, point in enumerate(points) if point[0] >= size_bytes), len(points) - 1)
        (low, low_ns), (high, high_ns) = points[above - 1], points[above]
        return round(low_ns + (high_ns - low_ns) * (size_bytes - low) / (high - low))


def machine_of(
    times: Mapping[str, float],
    busy: Mapping[str, float],
    cores: float,
    lone: Mapping[str, Sequence[tuple[int, int]]],
) -> Machine:
    """The machine as a run found it.

    Compute alone and communication alone each keep so many cores busy. Where both together need more than there are,
    communication gets what it needs, for it runs in short bursts, and compute what is left.

    Args:
        times: median seconds per step, by contestant.
        busy: median seconds of a core per step and rank, by contestant.
        cores: cores for each rank.
        lone: as in `Machine`.
    """
    needs = {name: busy[name] / times[name] for name in (COMPUTE, COMMUNICATION)}
    pace = (cores - needs[COMMUNICATION]) / needs[COMPUTE]
    return Machine(
        compute_s=times[COMPUTE] - times[OPTIMIZER],
        eager_s=times[EAGER_COMPUTE] - times[OPTIMIZER],
        optimizer_s=times[OPTIMIZER],
        pace=min(1.0, max(_LEAST_PACE, pace)),
        floor_s=(busy[COMPUTE] + busy[COMMUNICATION]) / cores,
        lone=lone,
    )


def busy_s() -> float:
    """Seconds that the cores of this machine were busy since it started, summed over cores. Linux.

    The kernel's network code counts, and the time that a hypervisor gave to others while somebody here wanted to run.
    """
    first = pathlib.Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    fields = [int(field) for field in first.split()[1:]][:_GUEST_FIELDS]
    return (sum(fields) - sum(fields[at] for at in _IDLE_FIELDS)) / os.sysconf("SC_CLK_TCK")


def lone_times() -> dict[str, list[tuple[int, int]]]:
    """By kind, bytes and ns of collectives over all ranks, one at a time. Every rank must call it."""
    group = dist.group.WORLD
    assert group is not None
    found = {}
    for kind in LONE_KINDS:
        payloads, times, issue_ns = collective_times(
            kind, group, torch.device("cpu"), _LONE_EFFORT, in_flight=1
        )
        found[kind] = [(payload, time + issue_ns) for payload, time in zip(payloads, times, strict=True)]
    return found
