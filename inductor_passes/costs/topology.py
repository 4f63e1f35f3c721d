"""Collective kinds and the shape of a process group: how many ranks, on how many nodes.

Owns the vocabulary the cost models share. Must not know profiles, graphs or torch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

COLLECTIVE_KINDS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "permute",
    "barrier",
)
"""Every collective the cost model prices."""


@dataclasses.dataclass(frozen=True)
class GroupTopology:
    """Where the ranks of a process group sit.

    Args:
        size: Ranks in the group.
        nodes: Nodes they sit on.
        ranks_per_node: Smallest number of them on any of these nodes; it bounds the network links a ring may
        use.

    Raises:
        ValueError: The numbers contradict one another.
    """

    size: int
    nodes: int = 1
    ranks_per_node: int = 0

    def __post_init__(self) -> None:
        if self.ranks_per_node == 0:
            object.__setattr__(self, "ranks_per_node", self.size // self.nodes if self.nodes > 0 else 0)
        if self.size < 1 or not 1 <= self.nodes <= self.size:
            raise ValueError(f"a group needs size >= 1 and 1 <= nodes <= size, got {self}")
        if not 1 <= self.ranks_per_node <= self.size // self.nodes:
            raise ValueError(f"ranks_per_node must be 1 to size // nodes, got {self}")


def topology_of(ranks: Iterable[int], ranks_per_node: int) -> GroupTopology:
    """Topology of a group from its global ranks, when consecutive ranks share a node.

    Args:
        ranks: Global ranks of the group.
        ranks_per_node: Ranks each node holds in the whole job.
    """
    if ranks_per_node < 1:
        raise ValueError(f"ranks_per_node must be >= 1, got {ranks_per_node}")
    counts = Counter(rank // ranks_per_node for rank in ranks)
    return GroupTopology(sum(counts.values()), len(counts), min(counts.values(), default=0))


def mesh_topology(ranks: Iterable[int], world_size: int, ranks_per_node: int) -> GroupTopology:
    """Topology that stands for every group of a mesh dim, so that all ranks price and plan alike.

    Groups of one dim can lie differently: of groups of six on nodes of eight, the first is on one node and the second
    on two. They all count as the worst placed of them.

    Args:
        ranks: global ranks of one group, in order.
        world_size: ranks of the job, over which the groups of the dim repeat.
        ranks_per_node: ranks each node holds in the whole job.
    """
    own = list(ranks)
    stride = own[1] - own[0] if len(own) > 1 else 1
    period = stride * len(own)
    regular = bool(own) and own == list(range(own[0], own[0] + period, stride))
    if not regular or own[0] % period >= stride or world_size % period:
        return topology_of(own, ranks_per_node)  # of no mesh over the whole job
    every = {
        topology_of(range(first + offset, first + offset + period, stride), ranks_per_node)
        for first in range(0, world_size, period)
        for offset in range(stride)
    }
    nodes = max(item.nodes for item in every)
    return GroupTopology(len(own), nodes, min(len(own) // nodes, *(item.ranks_per_node for item in every)))
