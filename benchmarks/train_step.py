"""Step time of every way to train one Llama, side by side, on a network of a chosen speed.

    sudo python -m benchmarks.train_step --ranks 2 --rate 1gbit     # network namespaces with a rate limit
    python -m benchmarks.train_step --ranks 2                       # loopback

Measured in one run, in rounds: each round times every contestant once, in an order that turns with the round, with a
barrier before each window; a window's time is its slowest rank's. The table gives the median over rounds and the
quartiles. "compute alone" is the compiled model on every rank at once without communication; "communication alone" is
one gather per block in forward, one in backward (when resharding) and one reduction per block, all started at once.
Warm-up and compilation come before and are not in the times. The machine is calibrated first, on the same network, and
our planners use that profile.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.contestants import contestants
from benchmarks.netbed import open_bed
from simplefsdp.llama.config import LlamaConfig
from simplefsdp.llama.model import Llama

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = pathlib.Path(__file__).parent / "results"
COMPUTE, COMMUNICATION = "compute alone", "communication alone"
_WARMUP_STEPS = 2
_CALIBRATION_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained, and how long it is timed.

    Args:
        dim, layers, ffn_dim, vocab_size: the Llama; heads are 64 wide.
        batch, sequence: sequences per rank and step, and tokens of each.
        rounds: windows of every contestant.
        steps: optimizer steps per window.
        reshard: free gathered parameters after forward.
    """

    dim: int = 512
    layers: int = 6
    ffn_dim: int = 1536
    vocab_size: int = 2048
    batch: int = 2
    sequence: int = 128
    rounds: int = 7
    steps: int = 2
    reshard: bool = True

    def config(self) -> LlamaConfig:
        """The model's shape."""
        return LlamaConfig(
            dim=self.dim,
            n_layers=self.layers,
            n_heads=self.dim // 64,
            n_kv_heads=self.dim // 64,
            ffn_dim=self.ffn_dim,
            vocab_size=self.vocab_size,
            max_seq_len=self.sequence,
        )


class Runner:
    """Runs steps of every contestant in this rank.

    Args:
        workload: what is trained.
        profile: hardware profile for our planners.
        only: names of contestants to run, all when empty.
    """

    def __init__(self, workload: Workload, profile: str | None, only: list[str]) -> None:
        self.workload = workload
        self.mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.losses: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.setup_s: dict[str, float] = {}
        self.steps: dict[str, Callable[[], None]] = {}
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (workload.batch, workload.sequence + 1)
        tokens = torch.randint(workload.vocab_size, shape, generator=generator)
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        torch.manual_seed(0)
        model = Llama(workload.config())
        self.steps[COMPUTE] = self._compute_alone(copy.deepcopy(model))
        self.steps[COMMUNICATION] = self._communication_alone(model)
        for contestant in contestants(workload.reshard, profile):
            if only and contestant.name not in only:
                continue
            begin = time.perf_counter()
            try:
                mine = copy.deepcopy(model)
                step = self._training_step(contestant.name, mine, contestant.build(mine, self.mesh))
                for _ in range(_WARMUP_STEPS):
                    step()
            except Exception as error:
                # Equal on every rank: what fails here fails while compiling.
                lines = str(error).strip().splitlines() or [""]
                self.failures[contestant.name] = f"{type(error).__name__}: {lines[0]}"
                continue
            self.setup_s[contestant.name] = time.perf_counter() - begin
            self.steps[contestant.name] = step

    def measure(self) -> dict[str, list[float]]:
        """Seconds per step of every contestant in every round, of the slowest rank."""
        names = list(self.steps)
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(self.workload.rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(self.workload.steps):
                    self.steps[name]()
                taken = torch.tensor((time.perf_counter() - begin) / self.workload.steps, dtype=torch.float64)
                dist.all_reduce(taken, dist.ReduceOp.MAX)
                times[name].append(float(taken))
        return times

    def _training_step(self, name: str, model: nn.Module, forward: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            loss = forward(*self.batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.losses[name] = loss.item()

        return step

    def _compute_alone(self, model: Llama) -> Callable[[], None]:
        forward = torch.compile(model, fullgraph=True)
        shards = [nn.Parameter(torch.empty(p.numel() // self.mesh.size())) for p in model.parameters()]
        for shard in shards:
            nn.init.zeros_(shard)
            shard.grad = torch.zeros_like(shard)
        optimizer = torch.optim.AdamW(shards, lr=1e-4, fused=True)

        def step() -> None:
            forward(*self.batch).backward()
            optimizer.step()
            model.zero_grad()

        for _ in range(_WARMUP_STEPS):
            step()
        return step

    def _communication_alone(self, model: Llama) -> Callable[[], None]:
        size = self.mesh.size()
        parts: list[nn.Module] = [
            model.embed_tokens,
            *model.layers,
            nn.ModuleList([model.norm, model.lm_head]),
        ]
        padded = [-(-sum(p.numel() for p in part.parameters()) // size) * size for part in parts]
        full = [torch.zeros(count) for count in padded]
        shards = [torch.zeros(count // size) for count in padded]
        gathers = 2 if self.workload.reshard else 1
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

        def step() -> None:
            pairs = list(zip(full, shards, strict=True))
            works = [gather(whole, shard, async_op=True) for _ in range(gathers) for whole, shard in pairs]
            works += [scatter(shard, whole, async_op=True) for whole, shard in pairs]
            for work in works:
                work.wait()

        return step


def work(workload: Workload, profile: str | None, only: list[str]) -> None:
    """What every rank does; rank 0 prints the measurements as JSON."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    # Contestants share the model's code, and each is a recompilation of it.
    torch._dynamo.config.recompile_limit = 64
    runner = Runner(workload, profile, only)
    load = os.getloadavg()[0]
    times = runner.measure()
    if dist.get_rank() == 0:
        found = {
            "times": times,
            "losses": runner.losses,
            "failures": runner.failures,
            "setup_s": runner.setup_s,
            "load": [load, os.getloadavg()[0]],
        }
        print(json.dumps(found))
    dist.destroy_process_group()


def table(found: dict[str, Any]) -> list[str]:
    """The measurements as the lines of a Markdown table."""
    medians = {name: statistics.median(times) for name, times in found["times"].items()}
    floor = max(medians[COMPUTE], medians[COMMUNICATION])
    lines = [
        "| | step, s | quartiles | / max(compute, communication) | loss |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, times in found["times"].items():
        low, _, high = statistics.quantiles(times, n=4)
        loss = f"{found['losses'][name]:.6f}" if name in found["losses"] else ""
        lines.append(
            f"| {name} | {medians[name]:.3f} | {low:.3f} to {high:.3f} | {medians[name] / floor:.2f} | {loss} |"
        )
    lines += [f"| {name} | failed: {reason} | | | |" for name, reason in found["failures"].items()]
    return lines


def record(workload: Workload, network: str, command: str, found: dict[str, Any]) -> str:
    """The text of a result file."""
    config = workload.config()
    medians = {name: statistics.median(times) for name, times in found["times"].items()}
    ratio = medians[COMMUNICATION] / medians[COMPUTE]
    before, after = found["load"]
    machine = f"torch {torch.__version__}, {_processor()}, {os.cpu_count()} cores"
    model = (
        f"Llama of {config.n_parameters:,} parameters ({config.n_layers} layers, width {config.dim}), fp32"
    )
    mode = "resharded after forward" if workload.reshard else "not resharded after forward"
    lines = [
        f"# Training step, {network}",
        "",
        f"- command: `{command}`",
        f"- {datetime.date.today().isoformat()}, {machine}, load average {before:.1f} before and {after:.1f} after",
        f"- {model}, {workload.batch} x {workload.sequence} tokens per rank and step, fused AdamW, {mode}",
        f"- {workload.rounds} rounds of {workload.steps} steps; communication / compute = {ratio:.2f}",
        "",
        *table(found),
        "",
    ]
    return "\n".join(lines)


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--rate", help="bits per second of each link, for example 1gbit; loopback when not given"
    )
    parser.add_argument("--only", nargs="*", default=[], help="names of contestants, all when not given")
    parser.add_argument("--profile", help="hardware profile for our planners; measured when not given")
    parser.add_argument("--out", type=pathlib.Path, help=f"result file; in {RESULTS.name}/ when not given")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    for field in dataclasses.fields(Workload):
        if field.name == "reshard":
            parser.add_argument("--reshard", action=argparse.BooleanOptionalAction, default=True)
        else:
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Entry point; see the module docstring. Returns the exit code."""
    options = _parse(arguments)
    workload = Workload(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(Workload)}
    )
    if options.worker:
        work(workload, options.profile, options.only)
        return 0
    command = " ".join(["python -m benchmarks.train_step", *arguments])
    with open_bed(options.ranks, options.rate) as bed, tempfile.TemporaryDirectory() as folder:
        profile = options.profile
        if profile is None:
            profile = os.path.join(folder, "measured.json")
            calibration = [sys.executable, "-m", "inductor_passes.costs.calibrate", "--out", profile]
            bed.run(calibration, _CALIBRATION_TIMEOUT_S)
        worker = [
            sys.executable,
            "-m",
            "benchmarks.train_step",
            *arguments,
            "--worker",
            "yes",
            "--profile",
            profile,
        ]
        found = json.loads(bed.run(worker, options.timeout).strip().splitlines()[-1])
        text = record(workload, bed.description, command, found)
    kind = "reshard" if workload.reshard else "keep"
    out = options.out or RESULTS / f"train_step_{options.ranks}_{options.rate or 'loopback'}_{kind}.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(text)
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
