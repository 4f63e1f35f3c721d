"""Which sharding, checkpointing, batch and planner fit a device and give most tokens per second.

Owns the order in which candidates are looked at, and which are left out. Must not know how a step is traced or shown.

Traces are what takes time: a checkpointing mode is traced with two batches on one mesh, and all other batches and
sharding factors follow by arithmetic (`rescale.py`). A candidate can be no faster than its compute, so they are looked
at in that order until none that is left could join the best. Variants with other compute graphs (parameters that are
not resharded, or replicated) are traced only if they could be faster by `WORTH_A_TRACE`. The winner is traced as it is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from inductor_passes.costs.profiles import HardwareProfile
from simplefsdp.explainer.hardware import GIB
from simplefsdp.explainer.options import CheckpointMode
from simplefsdp.planner.predict import Prediction, predict
from simplefsdp.planner.request import Request
from simplefsdp.planner.rescale import World
from simplefsdp.planner.step import Family
from simplefsdp.planner.text import TIGHT_SHARE
from simplefsdp.planner.tracing import Say, TraceAll

WORTH_A_TRACE = 0.005
"""Share of the best speed that a variant must be able to add."""
MOST_BATCH = 4096
"""Sequences per device: where doubling ends for models so small that memory does not end it."""


@dataclasses.dataclass(frozen=True)
class Space:
    """What may be chosen.

    Args:
        modes: of activation checkpointing.
        batch: sequences per device; None leaves it open.
        factors: sharding factors, largest first.
        reshards: whether parameters are freed after forward.
        planners: the last that fits is taken.
    """

    modes: tuple[CheckpointMode, ...]
    batch: int | None
    factors: tuple[int, ...]
    reshards: tuple[bool, ...]
    planners: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A choice, and what it gives.

    Args:
        mode, batch, factor, reshard: the choice; the planner is the prediction's.
        prediction: modelled.
        is_traced: False where batch or factor follow by arithmetic.
        family: where it comes from.
    """

    mode: CheckpointMode
    batch: int
    factor: int
    reshard: bool
    prediction: Prediction
    is_traced: bool
    family: Family = dataclasses.field(repr=False, compare=False)

    @property
    def rate(self) -> float:
        """What is searched for: tokens per second and device, or batches where there are no tokens."""
        rate = self.prediction.tokens_per_s
        return 1e9 * self.batch / self.prediction.step_ns if rate is None else rate


@dataclasses.dataclass(frozen=True)
class Misfit:
    """A choice that needs more memory than there is; what is asked for above it needs more still.

    Args:
        mode, batch, factor, reshard: the choice; batch 0 is any.
        total_bytes: what it needs at least.
    """

    mode: CheckpointMode
    batch: int
    factor: int
    reshard: bool
    total_bytes: int


@dataclasses.dataclass(frozen=True)
class Findings:
    """What a search has found.

    Args:
        best: most tokens per second first; empty when nothing fits.
        misfits: the smallest choices that do not fit.
        notes: what was left out, and why; how the winner was checked.
        usable_bytes: of the device's memory.
    """

    best: tuple[Candidate, ...]
    misfits: tuple[Misfit, ...]
    notes: tuple[str, ...]
    usable_bytes: int


def sharding_factors(devices: int, ranks_per_node: int) -> tuple[int, ...]:
    """Factors worth trying, largest first: all devices, whole nodes, one node or what divides it, and one."""
    divisors = [number for number in range(1, devices + 1) if devices % number == 0]
    if devices <= ranks_per_node:
        return tuple(reversed(divisors))
    nodes = [number for number in divisors if number % ranks_per_node == 0]
    inside = max(number for number in divisors if number <= ranks_per_node)
    return tuple(sorted({devices, *nodes, inside, 1}, reverse=True))


class Search:
    """One search.

    Args:
        base: what to trace, but for what is chosen.
        space: what may be chosen.
        profile: hardware.
        memory_bytes: of a device.
        trace: traces several requests.
        say: told what is going on.
        count: how many of the best are wanted.
    """

    def __init__(
        self,
        base: Request,
        space: Space,
        profile: HardwareProfile,
        memory_bytes: int,
        trace: TraceAll,
        say: Say,
        count: int,
    ) -> None:
        self._base, self._space, self._profile = base, space, profile
        self._trace, self._say, self._count = trace, say, count
        self._usable = int(memory_bytes * TIGHT_SHARE)
        self._found: list[Candidate] = []
        self._misfits: dict[tuple[CheckpointMode, int, bool], Misfit] = {}
        self._notes: list[str] = []
        self._bounds: list[tuple[CheckpointMode, float]] = []
        self._least_whole = 0

    def run(self) -> Findings:
        """Search.

        Raises:
            UsageError, TraceError: a model cannot be traced.
            RescaleError: its batches or groups do not follow by arithmetic.
        """
        sharded = tuple(factor for factor in self._space.factors if factor > 1)
        first = self._space.reshards[0]
        self._look_at(self._space.modes, sharded or (1,), first)
        if sharded and len(self._space.reshards) > 1:
            self._look_further("parameters kept after forward", sharded, False)
        if sharded and 1 in self._space.factors:
            self._look_further("replicated parameters", (1,), first)
        self._compare_planners()
        self._check_winner()
        self._say("")
        return Findings(
            tuple(self._found[: self._count]),
            tuple(sorted(self._misfits.values(), key=lambda item: item.total_bytes)),
            tuple(self._notes),
            self._usable,
        )

    def _look_further(self, what: str, factors: tuple[int, ...], reshard: bool) -> None:
        """Trace a variant in the modes in which it could be faster than what is known."""
        modes: list[CheckpointMode] = []
        gain = 0.0
        for mode in self._space.modes:
            bound = max((rate for known, rate in self._bounds if known == mode), default=0.0)
            if self._found and bound <= self._found[0].rate * (1 + WORTH_A_TRACE):
                gain = max(gain, bound / self._found[0].rate - 1)
            elif self._may_fit(mode, factors, reshard):
                modes.append(mode)
        if gain:
            self._notes.append(f"{what}: could add at most {gain:.1%}, so this was not traced in every mode")
        if modes:
            self._look_at(tuple(modes), factors, reshard)

    def _may_fit(self, mode: CheckpointMode, factors: tuple[int, ...], reshard: bool) -> bool:
        """Whether parameters, gradients and moments alone leave room, where they are whole."""
        held = self._least_whole
        if factors[0] > 1 or held <= self._usable:
            return True
        self._misfits.setdefault((mode, 1, reshard), Misfit(mode, 0, 1, reshard, held))
        return False

    def _look_at(self, modes: Sequence[CheckpointMode], factors: tuple[int, ...], reshard: bool) -> None:
        """Trace modes, and evaluate their candidates, the most promising first."""
        families = self._families(modes, factors[0], reshard)
        waiting: list[tuple[float, CheckpointMode, int, int]] = []
        for mode, family in families.items():
            self._least_whole = family.high.traced.stored(1).least
            for batch in self._batches(family):
                least = self._predict(family, batch, factors[0], "none")
                if not self._fits(mode, batch, factors[0], reshard, least):
                    break
                bound = self._bound(family, batch, least.optimizer_ns)
                self._bounds.append((mode, bound))
                waiting += [(bound, mode, batch, factor) for factor in factors]
        waiting.sort(key=lambda item: (-item[0], item[2], -item[3]))
        for number, (bound, mode, batch, factor) in enumerate(waiting):
            if len(self._found) >= self._count and bound <= self._found[self._count - 1].rate:
                break
            self._say(f"looking at {number + 1} of {len(waiting)}")
            known = self._misfits.get((mode, factor, reshard))
            if known is None or batch < known.batch:
                self._evaluate(families[mode], mode, batch, factor, reshard)

    def _evaluate(self, family: Family, mode: CheckpointMode, batch: int, factor: int, reshard: bool) -> None:
        """Take the last planner with which a choice fits, or note that there is none."""
        for planner in reversed(self._space.planners):
            prediction = self._predict(family, batch, factor, planner)
            if prediction.memory.total_bytes <= self._usable:
                is_traced = family.is_traced(batch) and factor == family.high.request.factor
                self._add(Candidate(mode, batch, factor, reshard, prediction, is_traced, family))
                return
        self._fits(mode, batch, factor, reshard, prediction)

    def _add(self, candidate: Candidate) -> None:
        self._found.append(candidate)
        self._found.sort(key=lambda item: -item.rate)

    def _compare_planners(self) -> None:
        """Let the other planners try the best choices."""
        for candidate in self._found[: self._count]:
            for planner in self._space.planners:
                if planner == candidate.prediction.planner:
                    continue
                item = self._predict(candidate.family, candidate.batch, candidate.factor, planner)
                other = dataclasses.replace(candidate, prediction=item)
                if item.memory.total_bytes <= self._usable and other.rate > candidate.rate:
                    self._found.remove(candidate)
                    candidate = other
                    self._found.append(candidate)
        self._found.sort(key=lambda item: -item.rate)

    def _fits(self, mode: CheckpointMode, batch: int, factor: int, reshard: bool, least: Prediction) -> bool:
        total = least.memory.total_bytes
        if total > self._usable:
            known = self._misfits.get((mode, factor, reshard))
            if known is None or batch < known.batch:
                self._misfits[mode, factor, reshard] = Misfit(mode, batch, factor, reshard, total)
        return total <= self._usable

    def _check_winner(self) -> None:
        """Trace the winner as it is, until the first of all is one that was traced."""
        while self._found and not self._found[0].is_traced:
            guess = self._found.pop(0)
            request = dataclasses.replace(
                self._base, ac=guess.mode, batch=guess.batch, factor=guess.factor, reshard=guess.reshard
            )
            (step,) = self._trace([request])
            family = Family(step, step, self._profile)
            real = self._predict(family, guess.batch, guess.factor, guess.prediction.planner)
            if not self._fits(guess.mode, guess.batch, guess.factor, guess.reshard, real):
                continue
            checked = dataclasses.replace(guess, prediction=real, is_traced=True)
            self._add(checked)
            more_bytes = real.memory.total_bytes - guess.prediction.memory.total_bytes
            self._notes.append(
                f"traced as it is, the best makes {checked.rate / guess.rate - 1:+.2%} tokens per second and takes "
                f"{more_bytes / GIB:+.2f} GiB to what was computed from other batches and groups"
            )

    def _families(
        self, modes: Sequence[CheckpointMode], factor: int, reshard: bool
    ) -> dict[CheckpointMode, Family]:
        base = dataclasses.replace(self._base, factor=factor, reshard=reshard)
        batches = (1, 2) if self._space.batch is None else (self._space.batch,)
        steps = iter(
            self._trace(
                [dataclasses.replace(base, ac=mode, batch=batch) for mode in modes for batch in batches]
            )
        )
        pairs = {mode: [next(steps) for _ in batches] for mode in modes}
        return {mode: Family(pair[0], pair[-1], self._profile) for mode, pair in pairs.items()}

    def _batches(self, family: Family) -> Iterator[int]:
        """1, 2, 3, 4, 6, 8, 12 and so on."""
        if self._space.batch is not None:
            yield family.high.request.batch
            return
        yield 1
        for power in itertools.count(1):
            for batch in (2**power, 2**power + 2 ** (power - 1)):
                if batch > MOST_BATCH:
                    return
                yield batch

    def _predict(self, family: Family, batch: int, factor: int, planner: str) -> Prediction:
        return predict(
            family.graphs(batch, World(self._base.devices, factor)),
            self._profile,
            family.high.traced.stored(factor),
            runs=family.high.traced.runs,
            planner=planner,
            tokens=family.high.tokens_of(batch),
            flops_per_token=family.high.flops_per_token,
        )

    def _bound(self, family: Family, batch: int, optimizer_ns: int) -> float:
        """The rate if communication took no time: none is higher."""
        graphs = family.graphs(batch, family.high.world)
        compute_ns = sum(sum(graphs[run.graph].problem.region_ns) for run in family.high.traced.runs)
        return (family.high.tokens_of(batch) or batch) * 1e9 / (compute_ns + optimizer_ns)


def describe(choice: Candidate | Misfit, is_own: bool) -> str:
    """A choice in words; a model of the user's own has no checkpointing and batch to choose."""
    words = [] if is_own else [f"checkpointing {choice.mode}"]
    words += [] if is_own or not choice.batch else [f"batch {choice.batch}"]
    words.append("replicated" if choice.factor == 1 else f"sharded over {choice.factor}")
    return ", ".join([*words, *([] if choice.reshard else ["not resharded"])])
