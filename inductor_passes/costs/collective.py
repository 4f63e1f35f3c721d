"""Time of a collective: ``alpha + traffic / bandwidth``, affine in bytes for a given kind and group.

Owns the formulas. Must not know graphs, plans or torch.

* Size in the interface is the full payload, the unsharded tensor: the output of an all-gather, the input of a
  reduce-scatter, all-reduce or all-to-all, the tensor of a broadcast.
* Traffic is the larger of the bytes one rank sends and receives: ``(W-1)/W`` of the payload for all-gather,
  reduce-scatter, all-to-all, gather and scatter, twice that for all-reduce, the payload for the others.
* Alpha is a base plus one hop per ring step; of the ``W-1`` steps, ``nodes-1`` cross the network. An
  all-reduce runs both halves, or a tree where that is shorter. This is the latency model of NCCL
  (``src/graph/tuning.cc``).
* Bandwidth of a ring is that of its slowest link: inside a node the link of one rank, between nodes the
  network links of as many ranks as the group has on each node, since NCCL runs one ring through each.
* A group of one communicates nothing: its time is 0.
"""

from __future__ import annotations

import dataclasses

from inductor_passes.costs.profiles import HardwareProfile
from inductor_passes.costs.topology import COLLECTIVE_KINDS, GroupTopology

NS_PER_S = 10**9

_SHARDED_TRAFFIC = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_POINT_TO_POINT = ("gather", "scatter", "permute")


@dataclasses.dataclass(frozen=True)
class CollectiveModel:
    """Prices collectives with the constants of one profile."""

    profile: HardwareProfile

    def time_ns(self, kind: str, topology: GroupTopology, size_bytes: int) -> int:
        """Time of one collective.

        Args:
            kind: One of ``COLLECTIVE_KINDS``.
            topology: The process group.
            size_bytes: Full payload in bytes, as in the module docstring.

        Returns:
            Whole nanoseconds; 0 for a group of one.

        Raises:
            ValueError: Unknown kind or negative size.
        """
        return self.alpha_ns(kind, topology) + self.transfer_ns(kind, topology, size_bytes)

    def alpha_ns(self, kind: str, topology: GroupTopology) -> int:
        """The part of the time that does not depend on the size: what merging two collectives saves."""
        check_kind(kind)
        if topology.size == 1:
            return 0
        measured = self._find_measured(kind, topology)
        if measured is not None:
            return measured[0]
        intra, inter = self.profile.value("intra_hop"), self.profile.value("inter_hop")
        ring = (topology.size - topology.nodes) * intra + (topology.nodes - 1) * inter
        if kind in _POINT_TO_POINT:
            hops = inter if topology.nodes > 1 else intra
        elif kind in ("all_reduce", "barrier"):
            tree = 2 * ((topology.ranks_per_node - 1) * intra + (topology.nodes - 1).bit_length() * inter)
            hops = min(2 * ring, tree) if topology.nodes > 1 else 2 * ring
        else:
            hops = ring
        return self.profile.value("collective_base") + hops

    def transfer_ns(self, kind: str, topology: GroupTopology, size_bytes: int) -> int:
        """The part of the time that grows with the size; whole ns, rounded up."""
        traffic = traffic_bytes(kind, topology.size, size_bytes)
        if traffic == 0:
            return 0
        measured = self._find_measured(kind, topology)
        if measured is not None:
            return _ns(traffic, measured[1])
        link = self._scaled("intra_bandwidth", "intra_efficiency")
        network = self._scaled("inter_bandwidth", "inter_efficiency")
        if topology.nodes == 1:
            return _ns(traffic, link)
        if kind == "all_to_all":
            inside = size_bytes * (topology.ranks_per_node - 1) // topology.size
            outside = size_bytes * (topology.size - topology.ranks_per_node) // topology.size
            return max(_ns(inside, link), _ns(outside, network))
        if kind in _POINT_TO_POINT:
            return _ns(traffic, network)
        rings = topology.ranks_per_node * network
        return _ns(traffic, rings if topology.ranks_per_node == 1 else min(link, rings))

    def _scaled(self, bandwidth: str, efficiency: str) -> int:
        return self.profile.value(bandwidth) * self.profile.value(efficiency) // 1000

    def _find_measured(self, kind: str, topology: GroupTopology) -> tuple[int, int] | None:
        for item in self.profile.collectives:
            shape = (item.group_size, item.nodes, item.ranks_per_node)
            if item.kind == kind and shape == (topology.size, topology.nodes, topology.ranks_per_node):
                return item.alpha_ns, item.bandwidth
        return None


def traffic_bytes(kind: str, group_size: int, size_bytes: int) -> int:
    """The larger of the bytes one rank sends and receives in a collective of ``size_bytes`` payload."""
    check_kind(kind)
    if size_bytes < 0:
        raise ValueError(f"size_bytes must be >= 0, got {size_bytes}")
    if group_size == 1 or kind == "barrier":
        return 0
    if kind in _SHARDED_TRAFFIC:
        return -(-size_bytes * (group_size - 1) // group_size)
    if kind == "all_reduce":
        return -(-2 * size_bytes * (group_size - 1) // group_size)
    return size_bytes


def check_kind(kind: str) -> None:
    """Raise ``ValueError`` for a collective kind the model does not know."""
    if kind not in COLLECTIVE_KINDS:
        raise ValueError(f"unknown collective kind {kind!r}; accepted: {', '.join(COLLECTIVE_KINDS)}")


def _ns(size_bytes: int, bandwidth: int) -> int:
    return -(-size_bytes * NS_PER_S // max(1, bandwidth))
