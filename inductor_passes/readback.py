"""Kernel times as they turned out after fusion, under the keys by which the next compilation plans.

Owns the way back from scheduler nodes to the nodes of a graph. It must not know files or how plans are found.

Planning happens before TorchInductor fuses: `work` takes all light operators between two matrix products for one
kernel. What they really became, and how many bytes that moves, is known to the scheduler. A kernel's time is shared out
evenly over the light operators it came from, and the next compilation sums up shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inductor_passes import _compat, work
from inductor_passes.costs.compute import Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

    from inductor_passes.costs.model import CostModel


def kernel_times(graph: fx.Graph, snodes: Sequence[Any], cost: CostModel) -> dict[str, int]:
    """Time of every light node of a lowered graph, whole ns by `work.light_key`; nodes that share a key get the mean.

    Args:
        graph: the graph that was lowered.
        snodes: its scheduler nodes, after fusion.
        cost: prices of bytes moved.
    """
    nominal = work.nominal_size(graph)
    share_ns = {node: 0 for node in graph.nodes if node.op == "call_function" and work.is_light(node)}
    for snode in snodes:
        if (
            _compat.is_collective_kernel(snode)
            or _compat.is_wait_kernel(snode)
            or _compat.is_opaque_kernel(snode)
        ):
            continue
        origins = [node for node in _compat.origins(snode) if node in share_ns]
        time_ns = cost.compute_ns(Work(moved_bytes=_compat.accessed_bytes(snode)))
        for node in origins:
            share_ns[node] += time_ns // len(origins)
    found: dict[str, list[int]] = {}
    for node, time_ns in share_ns.items():
        found.setdefault(work.light_key(node, nominal), []).append(time_ns)
    return {key: sum(times) // len(times) for key, times in found.items()}
