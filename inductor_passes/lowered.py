"""Put fused scheduler nodes back into the order of the graph they were lowered from.

It owns that permutation. It must not know time, memory, or whether the order is worth having.

TorchInductor reorders kernels for memory after the graph passes. It may then compute all weight gradients at the very
end, or all reductions' inputs late, and the collectives, whose order is frozen, stand in line behind them.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

from inductor_passes import _compat
from inductor_passes import graph as fxg
from inductor_passes.motion_kernels import is_barrier, needed_before

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


def lowered_order(
    snodes: Sequence[Any], inputs: Mapping[Any, Collection[Any]], anchored: Collection[Any]
) -> list[Any]:
    """Scheduler nodes in the order of the graph, as far as what they need allows.

    Nothing passes a barrier, or a kernel that draws random numbers.

    Args:
        snodes: all of them, in the order found.
        inputs: what each needs to have run before.
        anchored: the kernels that may be barriers; collectives that the passes understand, and their copies, are none.

    Returns:
        A permutation of `snodes`.
    """
    stay = {
        snode for snode in anchored if is_barrier(snode) or any(map(fxg.is_random, _compat.origins(snode)))
    }
    needed = needed_before(snodes, inputs, stay)
    users: dict[Any, list[Any]] = {snode: [] for snode in snodes}
    for snode, sources in needed.items():
        for source in sources:
            users[source].append(snode)
    missing = {snode: len(sources) for snode, sources in needed.items()}
    entries = {snode: (_compat.lowered_position(snode), number) for number, snode in enumerate(snodes)}
    ready = [entries[snode] for snode in snodes if not missing[snode]]
    heapq.heapify(ready)
    order = []
    while ready:
        snode = snodes[heapq.heappop(ready)[1]]
        order.append(snode)
        for user in users[snode]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, entries[user])
    return order
