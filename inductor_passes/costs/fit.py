"""From measured times to the constants of a profile: least squares, in plain Python.

Owns the fits and the choice of groups to measure. Must not know torch or how the times were taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inductor_passes.costs.collective import NS_PER_S


@dataclasses.dataclass(frozen=True)
class AffineFit:
    """``time = alpha_ns + traffic / bandwidth``, and how far the worst point lies from it.

    ``bandwidth`` is in byte/s; ``worst_per_mille`` is the largest relative error over the fitted points.
    """

    alpha_ns: int
    bandwidth: int
    worst_per_mille: int


def fit_affine(traffic_bytes: Sequence[int], times_ns: Sequence[int]) -> AffineFit:
    """Fit alpha and bandwidth so that the sum of squared errors, each divided by its time, is least.

    The times span several powers of ten. Plain squares would leave the small ones, which carry alpha, no say; squares
    of relative errors would let them bend the bandwidth, at which nearly all bytes travel. A negative alpha is
    replaced by 0 and a slope that is not positive by the fastest of the points, refitting the other constant.

    Args:
        traffic_bytes: Bytes moved, at least two different values.
        times_ns: Measured times, > 0, one for each.

    Raises:
        ValueError: Fewer than two different sizes, or a time that is not positive.
    """
    if len(traffic_bytes) != len(times_ns) or len(dict.fromkeys(traffic_bytes)) < 2 or min(times_ns) <= 0:
        raise ValueError("a fit needs one positive time for each size and at least two different sizes")
    weights = [1.0 / time for time in times_ns]
    total = sum(weights)
    mean_size = sum(w * x for w, x in zip(weights, traffic_bytes, strict=True)) / total
    mean_time = sum(w * y for w, y in zip(weights, times_ns, strict=True)) / total
    points = list(zip(weights, traffic_bytes, times_ns, strict=True))
    spread = sum(w * (x - mean_size) ** 2 for w, x, _ in points)
    slope = sum(w * (x - mean_size) * (y - mean_time) for w, x, y in points) / spread
    alpha = mean_time - slope * mean_size
    if alpha < 0:
        alpha = 0.0
        slope = sum(w * x * y for w, x, y in points) / sum(w * x * x for w, x, _ in points)
    if slope <= 0:
        slope = min(y / x for _, x, y in points if x > 0)
        alpha = max(0.0, sum(w * (y - slope * x) for w, x, y in points) / total)
    worst = max(abs(alpha + slope * x - y) / y for _, x, y in points)
    return AffineFit(round(alpha), max(1, round(NS_PER_S / slope)), round(1000 * worst))


def fit_hops(steps: Sequence[int], alphas_ns: Sequence[int]) -> tuple[int, int]:
    """Split measured alphas into a base and a time per ring step, both >= 0.

    With one group size the two cannot be told apart; everything is then put into the hop, which is the
    cautious reading for larger groups.

    Args:
        steps: Ring steps of each group, ``size - 1``.
        alphas_ns: Measured alpha of each.

    Returns:
        Base and hop in ns.
    """
    count = len(steps)
    if len(dict.fromkeys(steps)) < 2:
        return 0, round(sum(alphas_ns) / max(1, sum(steps)))
    mean_step, mean_alpha = sum(steps) / count, sum(alphas_ns) / count
    hop = sum((s - mean_step) * (a - mean_alpha) for s, a in zip(steps, alphas_ns, strict=True)) / sum(
        (s - mean_step) ** 2 for s in steps
    )
    hop = max(0.0, hop)
    base = mean_alpha - hop * mean_step
    if base < 0:
        base = 0.0
        hop = sum(s * a for s, a in zip(steps, alphas_ns, strict=True)) / sum(s * s for s in steps)
    return round(base), round(hop)


def groups_to_measure(world_size: int, ranks_per_node: int) -> list[list[list[int]]]:
    """Which process groups to time: lists of disjoint rank groups, each list timed at once.

    Inside nodes 2, 4, 8, ... ranks up to all of a node; then one rank of each node, then all ranks.

    Args:
        world_size: Ranks of the job; consecutive ranks share a node.
        ranks_per_node: Ranks on each node; must divide ``world_size``.
    """
    if ranks_per_node < 1 or world_size % ranks_per_node:
        raise ValueError(f"ranks_per_node must divide the world size {world_size}, got {ranks_per_node}")
    nodes = [list(range(first, first + ranks_per_node)) for first in range(0, world_size, ranks_per_node)]
    sizes = []
    size = 2
    while size < ranks_per_node:
        sizes.append(size)
        size *= 2
    if ranks_per_node > 1:
        sizes.append(ranks_per_node)
    rounds = [[node[:size] for node in nodes] for size in sizes]
    if len(nodes) > 1:
        rounds.append([[node[local] for node in nodes] for local in range(ranks_per_node)])
        if ranks_per_node > 1:
            rounds.append([list(range(world_size))])
    return rounds
