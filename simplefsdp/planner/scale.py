"""How a step scales: 8 to 4096 devices, every number of nodes that may share a copy, with weak or strong scaling.

Owns which points there are, which batch each device has, and what has to be traced for them. Must not know how points
are drawn.

Weak scaling: each device keeps its batch. Strong scaling: all devices share a global batch; a device whose part is
larger than what it may take at once takes several equal passes per step and reduces in each, as
`simplefsdp train --accumulation-sync every` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from inductor_passes.costs.profiles import HardwareProfile
from simplefsdp.explainer.hardware import GIB
from simplefsdp.planner.predict import Prediction, predict
from simplefsdp.planner.rescale import World
from simplefsdp.planner.step import Family, Step, Tracer
from simplefsdp.planner.text import SPEED_HEAD, fit_word, speed_cells, table

DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True)
class Load:
    """What one device computes in a step.

    Args:
        world: the devices and their groups.
        batch: sequences in one pass.
        passes: forward and backward passes before the optimizer's step.
    """

    world: World
    batch: int
    passes: int = 1


@dataclasses.dataclass(frozen=True)
class ScalePoint:
    """A prediction for one number of devices.

    Args:
        load: what each computes.
        prediction: of a step with one pass.
    """

    load: Load
    prediction: Prediction

    @property
    def step_ns(self) -> int:
        """All passes and the optimizer."""
        once = self.prediction.optimizer_ns
        return (self.prediction.step_ns - once) * self.load.passes + once

    @property
    def exposed_ns(self) -> int:
        """Time in which compute waits for communication."""
        return self.prediction.exposed_ns * self.load.passes

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second and device."""
        tokens = self.prediction.tokens
        return None if tokens is None else tokens * self.load.passes * 1e9 / self.step_ns

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation."""
        rate, needed = self.tokens_per_s, self.prediction.flops_per_token
        return None if rate is None or needed is None else rate * needed / self.prediction.peak_flops

    @property
    def total_bytes(self) -> int:
        """Memory at the peak; between passes the reduced gradients stay."""
        return self.prediction.memory.total_bytes + (
            self.prediction.memory.parameters if self.load.passes > 1 else 0
        )

    def fit(self, memory_bytes: int | None) -> str:
        """Whether it fits, in a word."""
        return fit_word(self.total_bytes, memory_bytes)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to shard, on all numbers of devices that allow it.

    Args:
        name: for titles.
        worlds: fewest devices first.
        in_full: whether its points are shown one by one; others stand in the comparison of ways alone.
    """

    name: str
    worlds: tuple[World, ...]
    in_full: bool = True


def ways(factor: int | None, ranks_per_node: int) -> tuple[Way, ...]:
    """The ways to shard: over all, over one node or several, not at all.

    Args:
        factor: ranks that share one copy; None asks for all ways.
        ranks_per_node: devices of one node.
    """
    if factor is not None:
        return (
            Way(
                _way_name(factor),
                tuple(World(devices, factor) for devices in DEVICES if devices % factor == 0),
            ),
        )
    shared = [ranks_per_node, *(number for number in DEVICES if number > ranks_per_node)]
    hybrid = [
        Way(
            _way_name(number),
            tuple(
                World(devices, number) for devices in DEVICES if devices > number and devices % number == 0
            ),
            in_full=number == ranks_per_node,
        )
        for number in shared
        if number > 1 and number % ranks_per_node == 0
    ]
    return (
        Way("sharded over all", tuple(World(devices, devices) for devices in DEVICES)),
        *(way for way in hybrid if way.worlds),
        Way(_way_name(1), tuple(World(devices, 1) for devices in DEVICES)),
    )


def _way_name(factor: int) -> str:
    return "replicated" if factor == 1 else f"sharded over {factor}"


def loads(points: Sequence[World], batch: int, global_batch: int | None) -> Iterator[Load]:
    """What each device computes; worlds among which the global batch does not divide are left out.

    Args:
        points: the worlds.
        batch: the most sequences a device takes at once; with weak scaling, what it takes.
        global_batch: sequences of all devices together; None is weak scaling.
    """
    for world in points:
        if global_batch is None:
            yield Load(world, batch)
        elif global_batch % world.devices == 0:
            share = global_batch // world.devices
            once = max(size for size in range(1, min(share, batch) + 1) if share % size == 0)
            yield Load(world, once, share // once)


class Scaling:
    """Predictions of one step on many numbers of devices.

    Args:
        step: as traced; its batch is the most that a device takes at once.
        profile: hardware.
        memory_bytes: of a device, None where it is not known.
        planner: who plans.
        global_batch: sequences of all devices together; None is weak scaling.
        tracer: traces what does not follow from `step`.
    """

    def __init__(
        self,
        step: Step,
        profile: HardwareProfile,
        memory_bytes: int | None,
        planner: str,
        global_batch: int | None,
        tracer: Tracer,
    ) -> None:
        self._step, self._profile, self._memory_bytes = step, profile, memory_bytes
        self._planner, self._global_batch, self._tracer = planner, global_batch, tracer
        self._families: dict[bool, Family] = {}

    def series(self, factor: int | None) -> Iterator[tuple[Way, list[ScalePoint] | str]]:
        """Points of each way to shard, or why there are none.

        Args:
            factor: ranks that share one copy of the parameters; None asks for all ways.

        Raises:
            RescaleError: other devices do not follow by arithmetic from what can be traced.
            UsageError, TraceError: as `trace_step`.
        """
        for way in ways(factor, self._profile.value("ranks_per_node")):
            todo = list(loads(way.worlds, self._step.request.batch, self._global_batch))
            held = self._step.traced.stored(1).least
            if not todo:
                if self._global_batch is None:
                    yield way, f"none of these numbers of devices divides by a sharding factor of {factor}"
                else:
                    yield way, f"a global batch of {self._global_batch} divides among none of these devices"
            elif todo[0].world.factor == 1 and self._memory_bytes is not None and held > self._memory_bytes:
                room = f"{held / GIB:.1f} of {self._memory_bytes / GIB:.0f} GiB"
                yield way, f"does not fit: parameters, gradients and optimizer alone take {room}"
            else:
                family = self._family(todo)
                yield way, [self._point(family, load) for load in todo]

    def _point(self, family: Family, load: Load) -> ScalePoint:
        prediction = predict(
            family.make_graphs(load.batch, load.world),
            self._profile,
            family.high.traced.stored(load.world.factor),
            runs=family.high.traced.runs,
            planner=self._planner,
            tokens=family.high.tokens_of(load.batch),
            flops_per_token=family.high.flops_per_token,
        )
        return ScalePoint(load, prediction)

    def _family(self, todo: Sequence[Load]) -> Family:
        """What the points follow from; steps that replicate parameters and that shard them do not follow from each
        other."""
        request = self._step.request
        replicated = todo[0].world.factor == 1
        known = self._families.get(replicated)
        is_smaller = any(load.batch < request.batch for load in todo)
        if known is not None and (known.low is not known.high or not is_smaller):
            return known
        high = self._step if known is None else known.high
        if (request.factor == 1) != replicated or request.devices == 1:  # one device sends nothing
            world = todo[0].world
            high = self._tracer(dataclasses.replace(request, devices=world.devices, factor=world.factor))
        low = high
        if is_smaller:
            low = self._tracer(dataclasses.replace(high.request, batch=1))
        self._families[replicated] = Family(low, high, self._profile)
        return self._families[replicated]


def scaling_text(points: Sequence[ScalePoint], memory_bytes: int | None) -> str:
    """One line per number of devices.

    Args:
        points: of one way to shard, fewest devices first.
        memory_bytes: of a device, None where it is not known.
    """
    first = points[0]
    rows = []
    for point in points:
        # Work per device and time: with weak scaling the ratio of steps.
        pace = point.load.batch * point.load.passes / point.step_ns
        base = first.load.batch * first.load.passes / first.step_ns
        rows.append(
            (
                f"{point.load.world.devices}",
                f"{point.load.batch}" + (f" x {point.load.passes}" if point.load.passes > 1 else ""),
                f"{point.step_ns / 1e6:.1f}",
                f"{point.exposed_ns / point.step_ns:.1%}",
                *speed_cells(point.tokens_per_s, point.mfu),
                f"{pace / base:.1%}",
                f"{point.total_bytes / GIB:.1f}",
                point.fit(memory_bytes),
            )
        )
    head = (
        "devices",
        "batch",
        "step ms",
        "exposed",
        *SPEED_HEAD,
        f"speed to {first.load.world.devices}",
        "peak GiB",
        "fits",
    )
    return table(head, rows)


def ways_text(series: Mapping[str, Sequence[ScalePoint]], memory_bytes: int | None) -> str:
    """Steps side by side: one line per number of devices, one column per way to shard.

    Args:
        series: points of each way, by its name.
        memory_bytes: of a device, None where it is not known.

    Returns:
        A table in ms. A star marks the fastest that fits, brackets what does not fit.
    """
    columns = [{point.load.world.devices: point for point in points} for points in series.values()]
    rows = []
    for devices in sorted(set().union(*columns)):
        here = [column.get(devices) for column in columns]
        fitting = [point for point in here if point and point.fit(memory_bytes) in ("yes", "?")]
        best = min(fitting, key=lambda point: point.step_ns, default=None)
        rows.append((f"{devices}", *(_way_cell(point, point is best, memory_bytes) for point in here)))
    return table(("devices", *(name.removeprefix("sharded ") for name in series)), rows)


def _way_cell(point: ScalePoint | None, is_best: bool, memory_bytes: int | None) -> str:
    if point is None:
        return ""
    text = f"{point.step_ns / 1e6:.1f}"
    if point.fit(memory_bytes) == "no":
        return f"({text})"
    return f"{text}{'*' if is_best else ' '}"
