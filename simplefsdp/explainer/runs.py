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

_GRADIENTS = list(Memory).index(Memory.GRADIENTS)


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
        else:
            recorder.forward(number)
            forwards.append(number)
    return tuple(recorder.runs)


def peak_by_use(timelines: Sequence[Timeline], runs: Sequence[Run]) -> tuple[int, ...]:
    """Bytes at the moment of a step when most is held, by use, in the order of `Memory`.

    What a forward hands on is held until the end of its backward, whether that reads it or a later piece does.

    Args:
        timelines: of every graph.
        runs: of the step.
    """
    best = (0,) * len(Memory)
    saved: dict[int, tuple[int, ...]] = {}  # what each run of a forward left, until its backward begins
    gradients = 0
    for number, run in enumerate(runs):
        timeline = timelines[run.graph]
        if run.forward is not None:
            saved.pop(run.forward, None)  # the backward counts it
        others = [sum(column) for column in zip(*saved.values(), strict=True)] or [0] * len(Memory)
        others[_GRADIENTS] += gradients
        here = tuple(map(sum, zip(others, timeline.peak.by_use, strict=True)))
        best = max(best, here, key=sum)
        left = timeline.memory[-1].by_use
        if timeline.kind == "backward":
            gradients += left[_GRADIENTS]
        else:
            saved[number] = left
    return best
