"""Segmentations worth trying, before and after one is known to be good.

Owns how candidates are made and how busy they keep stream and links at least. Must not know when anything
starts: ``search`` places them and keeps the best.

A segmentation is a list of runs per key list of the instance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from inductor_passes.planners.instance import UNBOUNDED, Instance
from inductor_passes.planners.segment import Runs, best_runs

Segmentation = list[Runs]

PRICES_PER_MILLE = (10, 30, 100, 300, 1000, 1_000_000)
"""Prices of link time tried, in compute time per link time."""

SPREADS = (1, 2, 4)
"""A move is made at all places of a kind, at every second and at every fourth."""


def alone(instance: Instance) -> Segmentation:
    """Every collective in a run of its own."""
    return [[(at, at) for at in range(len(items.members))] for items in instance.lists]


def priced(
    instance: Instance, price_per_mille: int, cap_bytes: int | None, critical: frozenset[int] | None = None
) -> Segmentation:
    """Best runs of every list at a price; only collectives in ``critical`` are priced when it is given."""
    return [
        best_runs(
            items,
            [price_per_mille if critical is None or number in critical else 0 for number in items.members],
            cap_bytes,
            instance.problem.kernel_ns,
        )
        for items in instance.lists
    ]


def caps_bytes(instance: Instance) -> list[int | None]:
    """Caps on the bytes of a bucket worth trying: from a few collectives up to what memory lets run ahead."""
    sizes = [size for items in instance.lists for size in items.sizes()]
    mean = sum(sizes) // max(1, len(sizes))
    if instance.budget == UNBOUNDED:
        return [4 * mean, 16 * mean, 64 * mean, None]
    return [4 * mean, 16 * mean, instance.budget // 8, instance.budget // 4, None]


def priced_segmentations(instance: Instance) -> list[Segmentation]:
    """Distinct priced segmentations over all prices and caps, the least busy first."""
    found: dict[object, Segmentation] = {}
    for cap in caps_bytes(instance):
        for price in PRICES_PER_MILLE:
            runs = priced(instance, price, cap)
            found.setdefault(frozen(runs), runs)
    return sorted(found.values(), key=lambda runs: max(busy_ns(instance, runs)))


def frozen(runs: Sequence[Runs]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Hashable form of a segmentation."""
    return tuple(map(tuple, runs))


def busy_ns(instance: Instance, runs: Sequence[Runs]) -> list[int]:
    """Time the compute stream, and each process group, is busy under a segmentation: no step can be
    shorter."""
    stream = instance.compute_before[-1]
    links = list(instance.fixed_link_ns)
    for items, its_runs in zip(instance.lists, runs, strict=True):
        links[instance.group_of[items.members[0]]] += items.transfer_sum[-1] + len(its_runs) * items.alpha_ns
        copies = items.copy_sum
        for first, last in its_runs:
            if last > first and copies[last + 1] > copies[first]:
                stream += copies[last + 1] - copies[first] + instance.problem.kernel_ns
    return [stream, *links]


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A segmentation to mix into another, the share at which they balance, and how busy the mixture is at
    least."""

    other: Segmentation
    share_per_mille: int
    busy_ns: int


def promising_mixtures(
    instance: Instance, one: Segmentation, others: Sequence[Segmentation]
) -> list[Mixture]:
    """Mixtures of ``one`` with each of ``others`` that could beat both, the most promising first.

    One of the two keeps a link too busy, the other makes too many copies; in between there is a share at
    which the busiest of stream and links is least busy.
    """
    mine = busy_ns(instance, one)
    found = []
    for other in others:
        its = busy_ns(instance, other)
        share, least = 0, max(mine)
        for tried in range(25, 1000, 25):
            busy = max((a * (1000 - tried) + b * tried) // 1000 for a, b in zip(mine, its, strict=True))
            if busy < least:
                share, least = tried, busy
        if share > 0 and least < max(its):
            found.append(Mixture(other, share, least))
    return sorted(found, key=lambda mixture: mixture.busy_ns)


def blended(one: Segmentation, other: Segmentation, other_per_mille: int) -> Segmentation:
    """Parts of two segmentations, evenly interleaved.

    Every list is cut where both have a boundary; of the parts, ``other_per_mille`` in a thousand come from
    ``other``, spread as evenly as rounding allows. Layers repeat, so this uses two patterns in a proportion.
    """
    return [_blended_runs(a, b, other_per_mille) for a, b in zip(one, other, strict=True)]


def _blended_runs(one: Runs, other: Runs, other_per_mille: int) -> Runs:
    boundaries = {first for first, _ in one} & {first for first, _ in other}
    parts = [_parts(runs, boundaries) for runs in (one, other)]
    out: Runs = []
    for number, pair in enumerate(zip(*parts, strict=True)):
        due = (number + 1) * other_per_mille // 1000 - number * other_per_mille // 1000
        out += pair[due]
    return out


def _parts(runs: Runs, boundaries: set[int]) -> list[Runs]:
    out: list[Runs] = []
    for run in runs:
        if run[0] in boundaries:
            out.append([])
        out[-1].append(run)
    return out


def kind_moves(instance: Instance, runs: Segmentation) -> Iterator[Segmentation]:
    """Joins and splits made at one kind of place everywhere, or evenly at some of its places.

    Kinds are boundaries with equal neighbours, and members of equal size that are cut loose on both sides or
    joined to both. Frequent kinds come first.
    """
    for at, places in _kinds(instance):
        for spread in SPREADS:
            if spread > 1 and len(places) < 2 * spread:
                continue
            some = [place for chosen in places[::spread] for place in chosen]
            for join in (False, True):
                moved = _toggled(instance, runs, at, some, join)
                if moved is not None:
                    yield moved


def single_moves(instance: Instance, runs: Segmentation, near: frozenset[int]) -> Iterator[Segmentation]:
    """Joins and splits at one boundary beside a collective in ``near``."""
    for at, items in enumerate(instance.lists):
        for place in range(1, len(items.members)):
            if items.members[place] in near or items.members[place - 1] in near:
                for join in (False, True):
                    moved = _toggled(instance, runs, at, [place], join)
                    if moved is not None:
                        yield moved


def _kinds(instance: Instance) -> list[tuple[int, list[tuple[int, ...]]]]:
    out: list[tuple[int, list[tuple[int, ...]]]] = []
    for at, items in enumerate(instance.lists):
        sizes = items.sizes()
        kinds: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for place in range(1, len(sizes)):
            kinds.setdefault((sizes[place - 1], sizes[place]), []).append((place,))
            kinds.setdefault((sizes[place],), []).append((place, place + 1))
        out += [(at, places) for places in kinds.values()]
    out.sort(key=lambda kind: (-len(kind[1]), kind[0], kind[1][0]))
    return out


def _toggled(
    instance: Instance, runs: Segmentation, at: int, places: Sequence[int], join: bool
) -> Segmentation | None:
    """``runs`` with boundaries of list ``at`` removed or set; ``None`` when nothing changes.

    A join that would make an illegal run is left out.
    """
    wanted = dict.fromkeys(places)
    out: Runs = []
    for first, last in runs[at]:
        if not join:
            for cut in range(first + 1, last + 1):
                if cut in wanted:
                    out.append((first, cut - 1))
                    first = cut
            out.append((first, last))
        elif out and first in wanted and instance.lists[at].first_legal[last] <= out[-1][0]:
            out[-1] = (out[-1][0], last)
        else:
            out.append((first, last))
    if len(out) == len(runs[at]):
        return None
    return [out if number == at else its for number, its in enumerate(runs)]
