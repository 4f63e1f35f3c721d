"""The graphs of a step in the order in which they run, and what one run holds for another.

Owns the sums over a step that is more than one forward and one backward: where the graph breaks, each piece is a graph,
and a graph that equal modules share runs once for each of them. Must not know FX, plans or how times come about.

    runs     F0   F1   F1   B1   B1   B0        F1 is shared by two blocks
    held     .    F0   F0   F0   F0   .         what earlier forwards saved for backwards that have not begun
                       F1   F1
                                 +B1  +B1 +B1   gradients that earlier backwards have reduced
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from simplefsdp.explainer.facts import Memory
from simplefsdp.explainer.schedule import Timeline

_NOTHING = (0,) * len(Memory)


@dataclasses.dataclass(frozen=True)
class Run:
    """One execution of a compiled graph.

    Args:
        graph: its number.
        forward: number of the run that saved what this one reads, of a backward; None of all others.
    """

    graph: int
    forward: int | None = None


class Recorder:
    """Notes runs as they happen. A backward belongs to the last run of its forward that has had none.

    Attributes:
        runs: all so far.
    """

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._open: dict[int, list[int]] = {}  # runs of each forward graph whose backward has not run

    def forward(self, graph: int) -> None:
        """Note a run of a forward graph, or of one without backward."""
        self._open.setdefault(graph, []).append(len(self.runs))
        self.runs.append(Run(graph))

    def backward(self, graph: int, of: int | None) -> None:
        """Note a run of the backward of a forward graph, None where that is not known."""
        waiting = None if of is None else self._open.get(of)
        self.runs.append(Run(graph, waiting.pop() if waiting else None))


def once_each(kinds: Iterable[str]) -> tuple[Run, ...]:
    """The runs of graphs that run once each, in order; a backward is that of the last forward without one."""
    recorder = Recorder()
    forwards: list[int] = []
    for number, kind in enumerate(kinds):
        if kind == "backward":
            recorder.backward(number, forwards.pop() if forwards else None)
            continue
        recorder.forward(number)
        if kind == "forward":
            forwards.append(number)
    return tuple(recorder.runs)


def uses_that_stay(timeline: Timeline) -> frozenset[Memory]:
    """What of the tensors a graph ends with stays until the step is over: of a backward, gradients of parameters.

    Where nothing is reduced they cannot be told from the gradients that the next backward starts from: all stay.
    """
    if timeline.kind != "backward":
        return frozenset()
    reduces = any(item.use is Memory.GRADIENTS for item in timeline.holdings)
    return frozenset([Memory.GRADIENTS] if reduces else Memory)


def held_by_others(timelines: Sequence[Timeline], runs: Sequence[Run]) -> list[tuple[int, ...]]:
    """Bytes that other runs hold during each run, by use, in the order of `Memory`.

    What a forward hands on is held until its backward, which counts it itself; without a backward, until the next run
    has ended. Gradients stay; a parameter that several pieces use counts in each.

    Args:
        timelines: of every graph.
        runs: of the step.
    """
    awaited = {run.forward for run in runs}
    saved: dict[int, tuple[int, ...]] = {}
    passing = held = _NOTHING
    out = []
    for number, run in enumerate(runs):
        timeline = timelines[run.graph]
        if run.forward in saved:
            held = _minus(held, saved.pop(run.forward))
        out.append(_plus(held, passing))
        left = timeline.memory[-1].by_use
        passing = _NOTHING
        if timeline.kind == "backward":
            stays = uses_that_stay(timeline)
            held = _plus(held, [size if use in stays else 0 for use, size in zip(Memory, left, strict=True)])
        elif number in awaited:
            saved[number] = left
            held = _plus(held, left)
        else:
            passing = left
    return out


def peak_by_use(timelines: Sequence[Timeline], runs: Sequence[Run]) -> tuple[int, ...]:
    """Bytes at the moment of a step when most is held, by use, in the order of `Memory`; arguments as above."""
    moments = [
        _plus(others, timelines[run.graph].peak.by_use)
        for run, others in zip(runs, held_by_others(timelines, runs), strict=True)
    ]
    return max(moments, key=sum, default=_NOTHING)


def _plus(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    return tuple(one + other for one, other in zip(first, second, strict=True))


def _minus(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    return tuple(one - other for one, other in zip(first, second, strict=True))
