"""Event simulator: a schedule goes in; step time, exposed time with its reason, and the memory curve come out.

Owns the machine model and nothing else. Must not know graphs, buckets, budgets or torch.

The machine: compute is one stream that takes the nodes in order; each process group is a FIFO beside it::

    compute   |=copy=|S0|====matmul====|W0|==matmul==|..idle..|W1|
    group A          |~~~~~~ 0 ~~~~~~|
    group B             |~~~~~~~~~~~~ 1 ~~~~~~~~~~~~~~~~~~~~~~~|

* ``Compute`` occupies the stream for its duration.
* ``Start`` occupies the stream for ``issue_ns``; then its collective begins as soon as its group is free.
* ``Wait`` blocks the stream until its collective has ended. The time it blocks is *exposed*.
* The step ends when the stream and every group are done.
* Memory: a node allocates when it begins and frees when it ends.

One pass over the nodes, integer nanoseconds, no choice to make: equal schedules give equal results.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Compute:
    """Work on the compute stream: kernels, or the copy into or out of a bucket."""

    duration_ns: int
    alloc_bytes: int = 0
    free_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Start:
    """Start of collective number ``collective`` on the FIFO ``group``."""

    collective: int
    group: str
    duration_ns: int
    issue_ns: int = 0
    alloc_bytes: int = 0
    free_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Wait:
    """Wait for collective number ``collective``."""

    collective: int
    alloc_bytes: int = 0
    free_bytes: int = 0


Node = Compute | Start | Wait


class ExposureReason(str, enum.Enum):
    """Why a wait blocked the compute stream, or that it did not."""

    HIDDEN = "hidden"
    """It did not block."""
    FIRST = "nothing computed before it is needed"
    """No compute comes before its wait: nothing could hide it."""
    LAST = "nothing left to compute after it"
    """No compute comes after its wait: only its own length matters."""
    QUEUED = "queued behind another collective of its group"
    """Most of the exposed time is time it stood in line; ``blocker`` names the one before it."""
    SHORT = "compute between start and wait is shorter than it"
    """It started when issued and still was not done: issued too late, or too long for what hides it."""


@dataclasses.dataclass(frozen=True)
class CollectiveTiming:
    """When one collective was issued, ran and was waited for; all times in ns from the start of the step.

    ``waited_ns`` is when its wait began to block; a collective without a wait is waited for at the end, in the
    order of the starts. ``blocker`` is the collective before it in its group when ``reason`` is ``QUEUED``.
    """

    collective: int
    group: str
    issued_ns: int
    begin_ns: int
    end_ns: int
    waited_ns: int
    exposed_ns: int
    reason: ExposureReason
    blocker: int | None = None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What a schedule costs.

    Args:
        step_ns: End of the step.
        compute_ns: Time the stream was busy: compute plus issuing.
        begin_ns: When each node began on the stream. A ``Wait`` begins when it starts to block.
        live_bytes: Bytes allocated while each node ran.
        collectives: One timing per collective, in the order of their starts.
    """

    step_ns: int
    compute_ns: int
    begin_ns: tuple[int, ...]
    live_bytes: tuple[int, ...]
    collectives: tuple[CollectiveTiming, ...]

    @property
    def exposed_ns(self) -> int:
        """Total time the compute stream stood still: ``step_ns`` minus ``compute_ns``."""
        return sum(timing.exposed_ns for timing in self.collectives)

    @property
    def peak_bytes(self) -> int:
        """Largest value of the memory curve; 0 for an empty schedule."""
        return max(self.live_bytes, default=0)


def simulate(nodes: Sequence[Node], initial_bytes: int = 0) -> Timeline:
    """Run a schedule on the machine of the module docstring. O(len(nodes)).

    Args:
        nodes: The schedule, in the order of the compute stream.
        initial_bytes: Bytes live before the first node.

    Returns:
        Times, exposed time per collective with its reason, and the memory curve.

    Raises:
        ValueError: A collective is started twice, waited for twice, or waited for before its start.
    """
    now = compute_ns = 0
    live = initial_bytes
    begin_ns: list[int] = []
    live_bytes: list[int] = []
    issued: dict[int, _Issued] = {}
    free_at: dict[str, int] = {}
    last_of: dict[str, int] = {}
    first_compute = last_compute = -1
    for position, node in enumerate(nodes):
        begin_ns.append(now)
        live += node.alloc_bytes
        live_bytes.append(live)
        if isinstance(node, Compute):
            now += node.duration_ns
            compute_ns += node.duration_ns
            if node.duration_ns > 0:
                first_compute = position if first_compute < 0 else first_compute
                last_compute = position
        elif isinstance(node, Start):
            if node.collective in issued:
                raise ValueError(f"collective {node.collective} is started twice")
            now += node.issue_ns
            compute_ns += node.issue_ns
            begin = max(now, free_at.get(node.group, 0))
            end = begin + node.duration_ns
            issued[node.collective] = _Issued(node.group, now, begin, end, last_of.get(node.group))
            free_at[node.group] = end
            last_of[node.group] = node.collective
        else:
            record = issued.get(node.collective)
            if record is None or record.wait_at is not None:
                problem = "before its start" if record is None else "twice"
                raise ValueError(f"collective {node.collective} is waited for {problem}")
            record.wait_at, record.waited_ns = position, now
            now = max(now, record.end_ns)
        live -= node.free_bytes
    timings = []
    for number, record in issued.items():
        if record.wait_at is None:
            record.wait_at, record.waited_ns = len(nodes), now
            now = max(now, record.end_ns)
        timings.append(_timing(number, record, first_compute, last_compute))
    return Timeline(now, compute_ns, tuple(begin_ns), tuple(live_bytes), tuple(timings))


@dataclasses.dataclass
class _Issued:
    group: str
    issued_ns: int
    begin_ns: int
    end_ns: int
    before: int | None
    wait_at: int | None = None
    waited_ns: int = 0


def _timing(number: int, record: _Issued, first_compute: int, last_compute: int) -> CollectiveTiming:
    assert record.wait_at is not None
    exposed = max(0, record.end_ns - record.waited_ns)
    queued = min(exposed, record.begin_ns - record.issued_ns)
    blocker = None
    if exposed == 0:
        reason = ExposureReason.HIDDEN
    elif 2 * queued >= exposed and record.before is not None:
        reason, blocker = ExposureReason.QUEUED, record.before
    elif first_compute < 0 or first_compute > record.wait_at:
        reason = ExposureReason.FIRST
    elif last_compute < record.wait_at:
        reason = ExposureReason.LAST
    else:
        reason = ExposureReason.SHORT
    return CollectiveTiming(
        number,
        record.group,
        record.issued_ns,
        record.begin_ns,
        record.end_ns,
        record.waited_ns,
        exposed,
        reason,
        blocker,
    )
