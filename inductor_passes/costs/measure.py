"""Timing of the machine at hand: matmul rate, memory bandwidth, kernel cost, collectives.

Owns the measurements only: what was timed, with which sizes, how often. Must not know profiles or fits. Every
timing synchronises the device first, is repeated, and reports the median of the slowest rank.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

IN_FLIGHT = 8
"""Collectives in the timed queue, unless another number is asked for."""

_LEAST_SIZES, _LEAST_REPEATS = 4, 3
_POINT_NS = 2 * 10**9
"""A point is repeated for about so long, if the effort asks for as many repeats."""
_LONGEST_QUEUE_NS = 2 * 10**9
"""Sizes at which the queue would take longer are left out."""

MEASURED_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much to measure. Sizes in bytes.

    Args:
        repeats: Timed repetitions of each measurement, after ``warmups`` untimed ones.
        matmul_size: Side of the square matmul.
        copy_bytes: Size of the memory copy.
        payload_bytes: Full payloads of the timed collectives.
        compute_ns: Compute is repeated for at least so long: clocks settle, and what disturbs a moment does not count.
    """

    repeats: int
    warmups: int
    matmul_size: int
    copy_bytes: int
    payload_bytes: tuple[int, ...]
    compute_ns: int = 0


EFFORTS = {
    "cpu": Effort(9, 2, 512, 1 << 26, tuple(1 << power for power in (14, 16, 18, 20, 22, 24)), 10**9),
    "cuda": Effort(20, 5, 8192, 1 << 30, tuple(1 << power for power in (16, 18, 20, 22, 24, 26, 28)), 10**9),
}


def compute_ns(call: Callable[[], object], device: torch.device, effort: Effort) -> int:
    """Median time of ``call`` in ns on the slowest rank, while all ranks call it.

    In training all ranks compute at once, and what they share is slower then: cores and caches of a host, its power.
    """
    if not dist.is_initialized():
        return median_ns(call, device, effort, effort.compute_ns)
    dist.barrier()
    return _slowest([median_ns(call, device, effort, effort.compute_ns)], None, device)[0]


def median_ns(
    call: Callable[[], object], device: torch.device, effort: Effort, least_total_ns: int = 0
) -> int:
    """Median time of ``call`` in ns, device work included; at least 1. Repeated for ``least_total_ns`` or longer."""
    for _ in range(effort.warmups):
        call()
    times: list[int] = []
    start = time.perf_counter_ns()
    while len(times) < effort.repeats or time.perf_counter_ns() - start < least_total_ns:
        _synchronize(device)
        begin = time.perf_counter_ns()
        call()
        _synchronize(device)
        times.append(time.perf_counter_ns() - begin)
    return max(1, round(statistics.median(times)))


def matmul_rate(dtype: torch.dtype, device: torch.device, effort: Effort) -> int:
    """Flop/s of a large square matmul in ``dtype``."""
    side = effort.matmul_size
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 * 10**9 // compute_ns(lambda: left @ right, device, effort)


def copy_bandwidth(device: torch.device, effort: Effort) -> int:
    """Byte/s of device memory in a large copy, read and write counted."""
    source = torch.ones(effort.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * effort.copy_bytes * 10**9 // compute_ns(lambda: target.copy_(source), device, effort)


def kernel_overhead_ns(device: torch.device, effort: Effort) -> int:
    """Time from one tiny kernel to the next on the compute stream."""
    tensor = torch.zeros(1, device=device)
    count = 200

    def many() -> None:
        for _ in range(count):
            tensor.add_(1)

    return compute_ns(many, device, effort) // count


def collective_times(
    kind: str,
    group: dist.ProcessGroup,
    device: torch.device,
    effort: Effort,
    in_flight: int = IN_FLIGHT,
) -> tuple[list[int], list[int], int]:
    """Time one collective kind on ``group`` at every payload of ``effort``.

    Every rank of the group must call it. Times are those of the slowest rank. A collective's time is what it adds to
    a queue of ``in_flight`` started at once, not how long one takes alone: the planners ask how fast a group works off
    its queue, where the latency of one hides behind the transfer of another. With one in flight it is the latter.

    On slow networks the largest sizes are left out, and what takes long is repeated less often.

    Returns:
        Full payloads in bytes; times in ns; and the ns a start keeps the caller. On a GPU the host runs ahead, so
        there the whole time belongs to the collective.
    """
    size = dist.get_world_size(group)
    payloads: list[int] = []
    times: list[int] = []
    issues: list[int] = []
    queue_ns = 0
    for wanted in effort.payload_bytes:
        if len(payloads) >= _LEAST_SIZES and queue_ns * wanted > _LONGEST_QUEUE_NS * payloads[-1]:
            break
        elements = max(1, wanted // 4 // size) * size
        starts = []
        for _ in range(in_flight):
            full = torch.ones(elements, device=device)
            starts.append(_starter(kind, full, torch.ones(elements // size, device=device), group))

        def queue(starts: list[Callable[[], dist.Work]] = starts) -> None:
            for work in [start() for start in starts]:
                work.wait()

        dist.barrier(group)
        once = dataclasses.replace(effort, warmups=effort.warmups - 1, repeats=1)
        (first_ns,) = _slowest([median_ns(queue, device, once)], group, device)
        repeats = max(_LEAST_REPEATS, min(effort.repeats, _POINT_NS // first_ns))
        rest = dataclasses.replace(effort, warmups=0, repeats=repeats)
        local = [median_ns(queue, device, rest), _issue_ns(starts[0], device, rest)]
        queue_ns, slowest_issue = _slowest(local, group, device)
        payloads.append(4 * elements)
        issue = slowest_issue if device.type == "cpu" else 0
        times.append(max(1, (queue_ns - issue) // in_flight))
        issues.append(issue)
    return payloads, times, round(statistics.median(issues))


def _slowest(values: list[int], group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    """The largest of each value over the ranks of a group, so that all decide alike."""
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
    return [int(value) for value in tensor.tolist()]


def _issue_ns(start: Callable[[], dist.Work], device: torch.device, effort: Effort) -> int:
    times = []
    for _ in range(effort.repeats):
        _synchronize(device)
        begin = time.perf_counter_ns()
        work = start()
        times.append(time.perf_counter_ns() - begin)
        work.wait()
    return round(statistics.median(times))


def _starter(
    kind: str, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
) -> Callable[[], dist.Work]:
    other = torch.empty_like(full)
    first = dist.get_global_rank(group, 0)
    # torch 2.13 renames both and warns on the old names; torch 2.11 and 2.12 have only those.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, Callable[[], dist.Work]] = {
        "all_gather": lambda: gather(full, shard, group=group, async_op=True),
        "reduce_scatter": lambda: scatter(shard, full, group=group, async_op=True),
        "all_reduce": lambda: dist.all_reduce(full, group=group, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(other, full, group=group, async_op=True),
        "broadcast": lambda: dist.broadcast(full, first, group, async_op=True),
    }
    return calls[kind]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
