"""Peak memory of every way to train one Llama: tensors and the whole process, a process per contestant.

    python -m benchmarks.memory --ranks 8

Each contestant trains in a process of its own, as the first of so many ranks: collectives fill their outputs as if
every rank were the same, take no time, and take no memory beyond the buffers they are given, like NCCL's. (gloo's
reduce-scatter copies what it is given, which is no property of a contestant.) After warm-up, compilation included, one
step runs under torch's profiler, which sees every allocation: "tensors" is the peak of that step with parameters,
optimizer states and the batch. "process" is the peak of the resident set over further steps, after freed memory went
back to the system; it holds torch itself and compiled code. `auto` runs with a memory budget that binds, of about one
block.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks import allocations
from benchmarks.contestants import Contestant, Setting, contestants
from benchmarks.lanes import Instant
from benchmarks.modelled_group import modelled_world
from benchmarks.names import AUTO, FSDP2, NO_PASSES, add_only
from benchmarks.netbed import RankFailure, open_bed
from benchmarks.record import RESULTS, command_line, conditions, markdown, variant, write
from benchmarks.workload import Workload, add_arguments, from_options, optimizer_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

_WARMUP_STEPS = 2
_COUNTED_STEPS = 3
_MIB = 2**20
_BYTES_PER_GB = 10**9


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Peak memory of one contestant on one rank, in bytes."""

    tensor_bytes: int
    process_bytes: int


def work(workload: Workload, contestant: Contestant, ranks: int) -> Footprint:
    """Train as the first of so many ranks, in a process without a process group."""
    torch.set_num_threads(1)
    with modelled_world(ranks, "cpu_gloo", Instant()):
        return _footprint(workload, contestant, init_device_mesh("cpu", (ranks,)))


def _footprint(workload: Workload, contestant: Contestant, mesh: DeviceMesh) -> Footprint:
    batch = workload.tokens(0)
    model = workload.model()
    forward = contestant.build(model, mesh)
    optimizer = optimizer_of(list(model.parameters()))

    def step() -> None:
        forward(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(_WARMUP_STEPS):
        step()
    allocations.forget_peak()
    for _ in range(_COUNTED_STEPS):
        step()
    process_bytes = allocations.peak_resident_set()
    states = [value for state in optimizer.state.values() for value in state.values()]
    kept = [*model.parameters(), *model.buffers(), *states, *batch]
    resident = allocations.resident_bytes(kept) + _reducer_bytes(forward)
    return Footprint(resident + allocations.peak_above_start(step), process_bytes)


def _reducer_bytes(module: nn.Module) -> int:
    """The buckets of DDP, which live beside the gradients."""
    if not isinstance(module, DistributedDataParallel):
        return 0
    sizes = module._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return sum(int(size) for size in sizes.split(","))


def verdicts(found: Mapping[str, Footprint], budget_bytes: int) -> list[tuple[str, str, str, str]]:
    """The bounds on memory: text, bound, measured, verdict."""
    rows = []
    if FSDP2 in found:
        bound = found[FSDP2].tensor_bytes
        rows += [
            _verdict(f"{name}: tensors at most {FSDP2}'s", bound, footprint.tensor_bytes)
            for name, footprint in found.items()
            if name.startswith("ours")
        ]
    if AUTO in found and NO_PASSES in found:
        extra = found[AUTO].tensor_bytes - found[NO_PASSES].tensor_bytes
        rows.append(
            _verdict(f"{AUTO}: tensors beyond those of '{NO_PASSES}', within the budget", budget_bytes, extra)
        )
    return rows


def _verdict(text: str, bound: int, measured: int) -> tuple[str, str, str, str]:
    verdict = "met" if measured <= bound else "missed"
    return text, f"{bound / _MIB:.1f}", f"{measured / _MIB:.1f}", verdict


def record(
    workload: Workload,
    command: str,
    load: Sequence[float],
    ranks: int,
    budget_bytes: int,
    found: Mapping[str, Footprint],
    failures: Mapping[str, str],
) -> str:
    """The text of a result file."""
    rows: list[tuple[object, ...]] = [
        (name, f"{item.tensor_bytes / _MIB:.1f}", f"{item.process_bytes / _MIB:.0f}")
        for name, item in found.items()
    ]
    rows += [(name, f"failed: {reason}", "") for name, reason in failures.items()]
    return "\n".join(
        [
            f"# Peak memory of a training step, one of {ranks} ranks",
            "",
            *conditions(command, load),
            *(f"- {line}" for line in workload.describe()),
            f"- budget of our passes {budget_bytes / _MIB:.1f} MiB; a block has {workload.block_bytes / _MIB:.1f} MiB",
            "",
            *markdown(("", "tensors, MiB", "process, MiB"), rows),
            "",
            *markdown(("target", "at most, MiB", "measured, MiB", "verdict"), verdicts(found, budget_bytes)),
            "",
        ]
    )


def main(arguments: list[str]) -> int:
    """Entry point; see the module docstring. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--budget-mb", type=float, help="budget of our passes, 10**6 bytes; a block when not given"
    )
    parser.add_argument("--profile", default="cpu_gloo", help="hardware profile of the planners")
    add_only(parser)
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for each contestant")
    parser.add_argument("--out", type=pathlib.Path, help=f"result file; in {RESULTS.name}/ when not given")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    add_arguments(parser, timed=False)
    options = parser.parse_args(arguments)
    workload = from_options(options)
    budget = workload.block_bytes if options.budget_mb is None else round(options.budget_mb * 10**6)
    setting = Setting(workload.reshard, options.profile, memory_budget_gb=budget / _BYTES_PER_GB)
    entrants = {
        item.name: item for item in contestants(setting) if not options.only or item.name in options.only
    }
    if options.worker:
        print(json.dumps(dataclasses.astuple(work(workload, entrants[options.worker], options.ranks))))
        return 0
    found: dict[str, Footprint] = {}
    failures: dict[str, str] = {}
    before = os.getloadavg()[0]
    with open_bed(1, None) as bed:
        for name, contestant in entrants.items():
            if contestant.unavailable:
                failures[name] = contestant.unavailable
                continue
            worker = [sys.executable, "-m", "benchmarks.memory", *arguments, "--worker", name]
            try:
                footprint = bed.result(worker, options.limit)
            except RankFailure as error:
                failures[name] = str(error).splitlines()[0]
                continue
            found[name] = Footprint(*footprint)
            print(f"{name}: {found[name]}", file=sys.stderr)
    kind = variant(workload.reshard, options.only)
    command = command_line("memory", arguments)
    load = before, os.getloadavg()[0]
    out = options.out or RESULTS / f"memory_{options.ranks}_{kind}.md"
    write(out, record(workload, command, load, options.ranks, budget, found, failures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
