"""Bucketings that trade alphas against copies: the best runs of one key list for a given price of link time.

Owns the dynamic programme and its parameters. Must not know slots or times of a schedule.

Merging saves one alpha of link time per collective merged away and costs compute time for copying all members
in and out. How much a nanosecond of link is worth in nanoseconds of compute depends on which of the two is
short; that is the price. For a given price the best legal segmentation of the list minimises

    sum over buckets of  price * alpha  +  (several members ? copies + 2 kernels : 0)

which a sliding-window minimum solves in O(list length). Price 0 leaves everything alone; a large price gives
the fewest buckets the caps allow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from inductor_passes.planners.keylists import KeyList

Runs = list[tuple[int, int]]


def best_runs(
    key_list: KeyList, price_per_mille: Sequence[int], cap_bytes: int | None, kernel_ns: int
) -> Runs:
    """Cheapest legal segmentation of a key list.

    Args:
        key_list: The list; its ``first_legal`` bounds every run.
        price_per_mille: Compute ns that one link ns is worth, in per mille, for a bucket ending at each
            position.
        cap_bytes: No run of several may hold more; ``None`` for no cap.
        kernel_ns: Cost of one more kernel; a bucket of several takes two.

    Returns:
        Runs as (first, last) positions, covering the list. Among equals the shorter last run wins.
    """
    sizes, copies = key_list.size_sum, key_list.copy_sum
    count = len(key_list.members)
    best = [0] * (count + 1)
    begins = [0] * count
    window: deque[tuple[int, int]] = deque()
    capped = 0
    for last in range(count):
        if last:
            value = best[last - 1] - 1000 * copies[last - 1]
            while window and window[-1][0] >= value:
                window.pop()
            window.append((value, last - 1))
        if cap_bytes is not None:
            while capped < last and sizes[last + 1] - sizes[capped] > cap_bytes:
                capped += 1
        first = max(capped, key_list.first_legal[last])
        while window and window[0][1] < first:
            window.popleft()
        alpha = price_per_mille[last] * key_list.alpha_ns
        best[last + 1] = best[last] + alpha
        begins[last] = last
        if window:
            several = window[0][0] + 1000 * (copies[last + 1] + 2 * kernel_ns) + alpha
            if several < best[last + 1]:
                best[last + 1] = several
                begins[last] = window[0][1]
    runs: Runs = []
    last = count - 1
    while last >= 0:
        runs.append((begins[last], last))
        last = begins[last] - 1
    runs.reverse()
    return runs


def all_runs(key_list: KeyList) -> list[Runs]:
    """Every legal segmentation of a key list; for small lists."""
    count = len(key_list.members)
    endings: list[list[Runs]] = [[[]]]
    for last in range(count):
        found = []
        for first in range(last, key_list.first_legal[last] - 1, -1):
            found += [[*runs, (first, last)] for runs in endings[first]]
        endings.append(found)
    return endings[count]
