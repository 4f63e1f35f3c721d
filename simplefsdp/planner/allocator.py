"""What torch's caching allocator reserves for a step whose tensors come and go as the simulator says.

Owns the model of the allocator. Must not know graphs or plans.

Memory statistics of GPU runs, published ones too, count what is *reserved*: address space once mapped stays mapped, and
a tensor needs a hole in one piece. With expandable segments (`PYTORCH_ALLOC_CONF=expandable_segments:True`) a stream
has one segment for tensors of more than 1 MiB and one for smaller ones. Each grows at its end; a request takes the
smallest hole that holds it, and leaves the rest as a hole. All tensors of a step are gone at its end, so every step is
like the first.

Constants are from torch's `c10/core/CachingDeviceAllocator` and `c10/cuda/CUDACachingAllocator.cpp` (2.6 to 2.13).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence

from simplefsdp.explainer.facts import Memory
from simplefsdp.explainer.runs import Run, uses_that_stay
from simplefsdp.explainer.schedule import Stream, Timeline

ROUND_BYTES = 512
"""Requests are rounded up to this (kMinBlockSize)."""
SMALL_BYTES = 2**20
"""Requests up to this are small (kSmallSize)."""
SMALL_PAGE_BYTES, LARGE_PAGE_BYTES = 2 * 2**20, 20 * 2**20
"""What a segment of small and one of large tensors grows by (kSmallBuffer, kLargeBuffer)."""


class Segment:
    """Address space of one stream: holes between tensors, and an end that only grows.

    Args:
        page_bytes: it grows by multiples of this.
    """

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._holes: list[tuple[int, int]] = []  # (begin, end), by address, none touching
        self._by_size: list[tuple[int, int]] = []  # the same holes: (size, begin)
        self._end = 0
        self._most = 0

    @property
    def reserved_bytes(self) -> int:
        """Address space mapped so far."""
        return -(-self._most // self._page_bytes) * self._page_bytes

    def allocate(self, size_bytes: int) -> int:
        """Take the smallest hole that is large enough, or grow; returns the address."""
        best = bisect.bisect_left(self._by_size, (size_bytes, 0))
        if best == len(self._by_size):
            begin, self._end = self._end, self._end + size_bytes
            self._most = max(self._most, self._end)
            return begin
        size, begin = self._by_size[best]
        self._remove(bisect.bisect_left(self._holes, (begin, begin)))
        if size > size_bytes:
            self._insert(begin + size_bytes, begin + size)
        return begin

    def free(self, begin: int, size_bytes: int) -> None:
        """Give back what `allocate` returned; neighbouring holes become one, a hole at the end goes."""
        end = begin + size_bytes
        at = bisect.bisect(self._holes, (begin, end))
        if at < len(self._holes) and self._holes[at][0] == end:
            end = self._remove(at)[1]
        if at and self._holes[at - 1][1] == begin:
            begin = self._remove(at - 1)[0]
        if end == self._end:
            self._end = begin
        else:
            self._insert(begin, end)

    def _insert(self, begin: int, end: int) -> None:
        bisect.insort(self._holes, (begin, end))
        bisect.insort(self._by_size, (end - begin, begin))

    def _remove(self, at: int) -> tuple[int, int]:
        begin, end = self._holes.pop(at)
        del self._by_size[bisect.bisect_left(self._by_size, (end - begin, begin))]
        return begin, end


@dataclasses.dataclass(frozen=True)
class _Change:
    """A tensor that comes or goes, in the order of the step."""

    tensor: int
    comes: bool


def reserved_bytes(
    timelines: Sequence[Timeline], runs: Sequence[Run], resident: Iterable[int], *, own_streams: bool
) -> int:
    """Reserved bytes of a training step.

    Args:
        timelines: of every graph.
        runs: of the step.
        resident: sizes of what is there throughout: parameters and optimizer states.
        own_streams: whether gathers and reductions allocate on streams of their own, as in FSDP2.
    """
    sizes, streams, changes = _script(timelines, runs)
    segments: dict[tuple[Stream, bool], Segment] = {}

    def segment(size_bytes: int, stream: Stream) -> Segment:
        small = size_bytes <= SMALL_BYTES
        key = (stream if own_streams else Stream.COMPUTE, small)
        return segments.setdefault(key, Segment(SMALL_PAGE_BYTES if small else LARGE_PAGE_BYTES))

    for size in map(_rounded, resident):
        segment(size, Stream.COMPUTE).allocate(size)
    homes = [segment(size, stream) for size, stream in zip(sizes, streams, strict=True)]
    address = [0] * len(sizes)
    for change in changes:
        tensor = change.tensor
        if change.comes:
            address[tensor] = homes[tensor].allocate(sizes[tensor])
        else:
            homes[tensor].free(address[tensor], sizes[tensor])
    return sum(item.reserved_bytes for item in segments.values())


_Left = dict[tuple[Memory, int], list[int]]
"""Tensors that a run has left, by use and size, in order of birth."""


def _script(
    timelines: Sequence[Timeline], runs: Sequence[Run]
) -> tuple[list[int], list[Stream], list[_Change]]:
    """Sizes and streams of all tensors of a step, and every coming and going in order.

    What outlives a forward goes on as what was there before its backward; what that does not take over goes when it
    begins. A backward hands the gradients it ends with to the next, and leaves those of parameters until the step is
    over. What a graph without backward makes goes when the next run begins.
    """
    sizes: list[int] = []
    streams: list[Stream] = []
    changes: list[_Change] = []
    awaited = {run.forward for run in runs}
    saved: dict[int, _Left] = {}  # by run of a forward
    ending: _Left = {}  # left by the run before, for the next
    for number, run in enumerate(runs):
        timeline = timelines[run.graph]
        taken = [ending] if run.forward is None else [saved.pop(run.forward, {}), ending]
        tensor_of: dict[int, int] = {}
        timed: list[tuple[int, int, _Change]] = []
        order = sorted(range(len(timeline.holdings)), key=lambda at: timeline.holdings[at].end)
        for at in order:  # what was made last is, among equals, used up first
            holding = timeline.holdings[at]
            key = holding.use, holding.size_bytes
            left = next((here[key] for here in taken if here.get(key)), None)
            if holding.before and left:
                tensor_of[at] = left.pop()
        changes += [_Change(tensor, False) for here in taken for rest in here.values() for tensor in rest]
        for at, holding in enumerate(timeline.holdings):
            if at not in tensor_of:
                tensor_of[at] = len(sizes)
                sizes.append(_rounded(holding.size_bytes))
                streams.append(holding.stream)
                timed.append((2 * holding.begin, len(timed), _Change(tensor_of[at], True)))
            if holding.end < timeline.nodes:
                timed.append((2 * holding.end + 1, len(timed), _Change(tensor_of[at], False)))
        timed.sort(key=lambda item: item[:2])
        changes += [change for _, _, change in timed]
        ending = {}
        out = saved.setdefault(number, {}) if number in awaited else ending
        stays = uses_that_stay(timeline)
        for at, holding in sorted(enumerate(timeline.holdings), key=lambda item: item[1].begin):
            if holding.end >= timeline.nodes and holding.use not in stays:
                out.setdefault((holding.use, holding.size_bytes), []).append(tensor_of[at])
    return sizes, streams, changes


def _rounded(size_bytes: int) -> int:
    return max(1, -(-size_bytes // ROUND_BYTES)) * ROUND_BYTES
