"""One GPU as one rank of a cluster: what the real compiled code hides, without the other ranks.

    python -m benchmarks.gpu_overlap --profile h100_sxm --ranks 64

Trains a Llama on one GPU under a process group whose collectives hold a side stream for the time that the hardware
profile gives them and fill their outputs (`modelled_group`). So kernels, streams, allocator and numbers are those of
one rank; only the time of communication is modelled, from the named profile. Per contestant:

- step: wall clock, and the same program with a network that takes no time; the difference is the exposed communication.
  Measured in turn, in rounds, medians.
- trace: one profiled step. Communication that no kernel ran beside, and the order of collectives and kernels (a second
  file).
- memory: the allocator's peak in a step.
- numbers: losses, and the first gradients against the whole model compiled without communication.

What it does not show: NCCL's use of multiprocessors and memory bandwidth (the stand-in takes one thread, and the
bandwidth of writing its outputs), ranks that are late, and the cost of NCCL's own launches.

Contestants are set up in turn until `--limit` seconds have passed; those that were not reached are named. `--rehearse`
runs all of it on the CPU with a small model, except the trace: to try the script, not to measure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from benchmarks.contestants import Contestant, Setting, contestants
from benchmarks.kernel_trace import Covered, activities, collectives
from benchmarks.lanes import Lane, Stream, Thread
from benchmarks.modelled_group import World, first_shard, modelled_world, repeat_first_shards
from benchmarks.names import AUTO, COMPUTE, FSDP2, NO_PASSES, NONE, add_only
from benchmarks.record import RESULTS, command_line, conditions, markdown, write
from benchmarks.rounds import in_turn, not_reached, reason_of
from benchmarks.workload import Workload, add_arguments, from_options, optimizer_of
from inductor_passes.costs.measure import EFFORTS, copy_bandwidth

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from simplefsdp.llama.model import Llama

NO_GPU = 2
"""Exit code without a GPU."""
ORDER = (FSDP2, AUTO, NONE, NO_PASSES)
"""Contestants, in the order in which they are set up: the most wanted first."""
_WARMUP_STEPS = 2
_MIB = 2**20


WORKLOAD = Workload(
    dim=4096,
    layers=8,
    heads=32,
    kv_heads=8,
    ffn_dim=14_336,
    vocab_size=32_768,
    batch=1,
    sequence=2048,
    rounds=5,
    steps=2,
)
"""Layers of Llama 3.1 8B, with few tokens: communication is about half."""
REHEARSAL = Workload(
    dim=64,
    layers=1,
    heads=2,
    kv_heads=1,
    ffn_dim=128,
    vocab_size=128,
    batch=2,
    sequence=16,
    rounds=2,
    steps=1,
)


@dataclasses.dataclass
class Entry:
    """One contestant, set up, and what was found about it.

    Args:
        step: trains one step.
        loss: reads the loss of the last step.
        setup_s: seconds of set-up: compilation and warm-up.
        first_loss: loss of the first step.
        gradient_error: norm of the difference of the first gradients to the reference's, over the reference's norm.
    """

    step: Callable[[], None]
    loss: Callable[[], float]
    setup_s: float
    first_loss: float
    gradient_error: float
    timed_s: list[float] = dataclasses.field(default_factory=list)
    instant_s: list[float] = dataclasses.field(default_factory=list)
    communication_s: float = 0.0
    peak_bytes: int = 0
    trace: list[Covered] = dataclasses.field(default_factory=list)


class Bench:
    """Sets contestants up and measures them, as the first rank of a modelled world.

    Args:
        workload: what is trained.
        world: the modelled world.
        mesh: all its ranks.
        device: the GPU, or the CPU in a rehearsal.
    """

    def __init__(self, workload: Workload, world: World, mesh: DeviceMesh, device: torch.device) -> None:
        self.workload, self.world, self.mesh, self.device = workload, world, mesh, device
        self.entries: dict[str, Entry] = {}
        self.failures: dict[str, str] = {}
        self.batch = [tokens.to(device) for tokens in workload.tokens(0)]
        self._reference: list[torch.Tensor] = []

    def model(self) -> Llama:
        """The model with the weights that every rank gathers, fp32."""
        with self.device:
            model = self.workload.model()
        repeat_first_shards(model.parameters(), self.mesh.size())
        return model

    def add_reference(self, policy: MixedPrecisionPolicy) -> None:
        """Compute alone: the whole model in the compute dtype, compiled, with the optimizer on shards."""
        model = self.model()
        if policy.param_dtype is not None:
            model.to(policy.param_dtype)
            model.rope.reset_tables()
        ranks = self.mesh.size()
        shards = [nn.Parameter(first_shard(p.detach(), ranks).float().clone()) for p in model.parameters()]
        optimizer = optimizer_of(shards)
        forward = torch.compile(model, fullgraph=True)

        def gradients() -> list[torch.Tensor]:
            return [first_shard(p.grad, ranks).float() for p in model.parameters() if p.grad is not None]

        def finish() -> None:
            for shard, gradient in zip(shards, gradients(), strict=True):
                shard.grad = gradient
            optimizer.step()
            model.zero_grad()

        self._reference = self._enter(COMPUTE, forward, gradients, finish)

    def add(self, contestant: Contestant) -> None:
        """Set one contestant up; a failure is kept and the next may follow."""
        try:
            model = self.model()
            forward = contestant.build(model, self.mesh)
            optimizer = optimizer_of(list(model.parameters()))

            def gradients() -> list[torch.Tensor]:
                return [_local(p.grad).float() for p in model.parameters() if p.grad is not None]

            def finish() -> None:
                optimizer.step()
                optimizer.zero_grad()

            self._enter(contestant.name, forward, gradients, finish)
        except Exception as error:
            self.failures[contestant.name] = reason_of(error)

    def measure(self) -> None:
        """Time everything that was set up, in rounds, with the network and without."""
        names = list(self.entries)
        for turn in range(self.workload.rounds):
            for name in in_turn(names, turn):
                entry = self.entries[name]
                self.world.timed = False
                entry.instant_s.append(self._seconds(entry.step))
                self.world.timed = True
                entry.timed_s.append(self._seconds(entry.step))
        for entry in self.entries.values():
            self.world.log.clear()
            entry.peak_bytes = self._peak_bytes(entry.step)
            entry.communication_s = sum(item.time_ns for item in self.world.log) / 1e9
            if self.device.type == "cuda":
                entry.trace = self._traced(entry.step)

    def _enter(
        self,
        name: str,
        forward: Callable[..., torch.Tensor],
        gradients: Callable[[], list[torch.Tensor]],
        finish: Callable[[], None],
    ) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []

        def backward() -> None:
            loss = forward(*self.batch)
            loss.backward()
            losses[:] = [loss.detach()]

        def step() -> None:
            backward()
            finish()

        begin = time.perf_counter()
        backward()
        first = [gradient.clone() for gradient in gradients()]
        first_loss = float(losses[0])
        finish()
        for _ in range(_WARMUP_STEPS - 1):
            step()
        self._synchronize()
        self.entries[name] = Entry(
            step,
            lambda: float(losses[0]),
            time.perf_counter() - begin,
            first_loss,
            _relative_error(first, self._reference),
        )
        return first

    def _seconds(self, step: Callable[[], None]) -> float:
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(self.workload.steps):
            step()
        self._synchronize()
        return (time.perf_counter() - begin) / self.workload.steps

    def _peak_bytes(self, step: Callable[[], None]) -> int:
        """Most bytes the allocator held in a step, beyond what was held before it; 0 on the CPU."""
        if self.device.type != "cuda":
            step()
            return 0
        self._synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        self._synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def _traced(self, step: Callable[[], None]) -> list[Covered]:
        kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=kinds) as profiler:
            step()
            self._synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return collectives(activities(json.loads(path.read_text(encoding="utf-8"))["traceEvents"]))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _relative_error(found: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Norm of the difference of two lists of tensors over the norm of the second; 0 without a second."""
    if not reference:
        return 0.0
    apart = sum(float((a - b).double().square().sum()) for a, b in zip(found, reference, strict=True))
    whole = sum(float(b.double().square().sum()) for b in reference)
    return math.sqrt(apart / whole)


def record(bench: Bench, command: str, load: Sequence[float], profile: str, notes: Sequence[str]) -> str:
    """The text of the result file."""
    workload = bench.workload
    rows: list[Sequence[object]] = []
    for name, entry in bench.entries.items():
        step, instant = statistics.median(entry.timed_s), statistics.median(entry.instant_s)
        low, high = min(entry.timed_s), max(entry.timed_s)
        traced = f"{sum(item.exposed_us for item in entry.trace) / 1e3:.2f}" if entry.trace else ""
        rows.append(
            (
                name,
                f"{step * 1e3:.2f}",
                f"{low * 1e3:.2f} to {high * 1e3:.2f}",
                f"{instant * 1e3:.2f}",
                f"{(step - instant) * 1e3:.2f}",
                f"{entry.communication_s * 1e3:.2f}",
                traced,
                f"{entry.peak_bytes / _MIB:.0f}" if entry.peak_bytes else "",
                f"{entry.first_loss:.6f}",
                "" if name == COMPUTE else f"{entry.loss():.6f}",  # its shards are not what it computes with
                f"{entry.gradient_error:.1e}",
                f"{entry.setup_s:.0f}",
            )
        )
    head = (
        *(
            "",
            "step, ms",
            "lowest to highest",
            "network free, ms",
            "exposed, ms",
            "communication, ms",
            "uncovered in trace, ms",
        ),
        *("peak above start, MiB", "first loss", "last loss", "gradient error", "set-up, s"),
    )
    precision = "fp32 storage, bf16 compute" if bench.device.type == "cuda" else "fp32"
    return "\n".join(
        [
            f"# One rank of {bench.mesh.size()}, collectives as long as {profile} says",
            "",
            *conditions(command, load),
            *(f"- {line}" for line in workload.describe(precision)),
            f"- {workload.rounds} rounds of {workload.steps} steps; times of collectives modelled, all others measured",
            *(f"- {note}" for note in notes),
            "",
            *markdown(head, rows),
            *(f"\n{name} failed: {reason}" for name, reason in bench.failures.items()),
            "",
        ]
    )


def order_text(bench: Bench) -> str:
    """When each collective of a traced step ran, and how many kernels began beside it."""
    lines = []
    for name, entry in bench.entries.items():
        if entry.trace:
            lines += [name, f"{'begin ms':>10} {'end ms':>10} {'uncovered ms':>13} {'kernels beside':>15}"]
            lines += [
                f"{c.begin_us / 1e3:>10.3f} {c.end_us / 1e3:>10.3f} {c.exposed_us / 1e3:>13.3f} {c.kernels:>15}"
                for c in entry.trace
            ]
    return "\n".join([*lines, ""])


def run(
    workload: Workload, options: argparse.Namespace, device: torch.device, command: str
) -> tuple[str, str]:
    """Set up and measure on a device; the text of the result and the order of collectives."""
    begin = time.perf_counter()
    before = os.getloadavg()[0]
    lane: Lane
    notes = []
    if device.type != "cuda":
        lane = Thread()
    else:
        torch.set_float32_matmul_precision("high")
        stream = Stream(device, copy_bandwidth(device, EFFORTS["cuda"]))
        lane = stream
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if device.type == "cuda"
        else MixedPrecisionPolicy()
    )
    # Contestants share the model's code, and each is a recompilation of it.
    torch._dynamo.config.recompile_limit = 64
    with modelled_world(options.ranks, options.profile, lane, device.type) as world:
        bench = Bench(workload, world, init_device_mesh(device.type, (options.ranks,)), device)
        bench.add_reference(policy)
        known = {item.name: item for item in contestants(Setting(workload.reshard, options.profile, policy))}
        for name in options.only or ORDER:
            if time.perf_counter() - begin > options.limit:
                bench.failures[name] = not_reached(options.limit)
            else:
                bench.add(known[name])
        if isinstance(lane, Stream):
            idle = lane.cycles_per_ns
            lane.calibrate()  # at the clock of a busy GPU
            notes.append(
                f"the spinning kernel takes {lane.cycles_per_ns:.3f} cycles per ns ({idle:.3f} before the set-up)"
            )
        bench.measure()
        text = record(bench, command, (before, os.getloadavg()[0]), options.profile, notes)
        return text, order_text(bench)


def main(arguments: list[str]) -> int:
    """Entry point; see the module docstring. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_overlap",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--profile", default="h100_sxm", help="hardware profile that times collectives")
    parser.add_argument("--ranks", type=int, default=64)
    add_only(parser, default=ORDER)
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds after which nobody else is set up"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="try the script on the CPU with a small model"
    )
    parser.add_argument("--out", type=pathlib.Path, help=f"result file; in {RESULTS.name}/ when not given")
    add_arguments(parser, WORKLOAD)
    options = parser.parse_args(arguments)
    if options.rehearse:
        parser.set_defaults(**dataclasses.asdict(REHEARSAL))
        options = parser.parse_args(arguments)
    if not options.rehearse and not torch.cuda.is_available():
        print(
            "benchmarks.gpu_overlap needs a CUDA GPU and a torch built for it, and found none "
            f"(torch {torch.__version__}); --rehearse tries the script on the CPU",
            file=sys.stderr,
        )
        return NO_GPU
    device = torch.device("cpu") if options.rehearse else torch.device("cuda", torch.cuda.current_device())
    text, order = run(from_options(options), options, device, command_line("gpu_overlap", arguments))
    if options.rehearse and options.out is None:
        print(text)
        return 0
    out = options.out or RESULTS / f"gpu_overlap_{pathlib.Path(options.profile).stem}_{options.ranks}.md"
    write(out, text)
    if order.strip():
        out.with_suffix(".order.txt").write_text(order, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
