"""Step time of every way to train one Llama, side by side, on a network of a chosen speed.

    sudo python -m benchmarks.train_step --ranks 2 --rate 1gbit     # network namespaces with a rate limit
    python -m benchmarks.train_step --ranks 2                       # loopback

Measured in one run, in rounds: each round times every contestant once, in an order that turns with the round, with a
barrier before each window; a window's time is its slowest rank's. The table gives the median over rounds, the lowest
and the highest. "compute alone" is the compiled model on every rank at once without communication, with the optimizer
on the shards; "compute alone, eager" the same, not compiled; "communication alone" is one gather per block in forward,
one in backward (when resharding) and one reduction per block, all started at once. Warm-up and compilation come before
and are not in the times. The machine is calibrated first, on the same network; our planners, the stock passes and the
predictions use that profile. A result comes with the targets it met and missed, the simulator's predictions, a picture,
and a file with every single time.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.contestants import Contestant, Setting, contestants
from benchmarks.machine import Machine, busy_s, lone_times, machine_of
from benchmarks.names import COMMUNICATION, COMPUTE, EAGER_COMPUTE, OPTIMIZER, add_only
from benchmarks.netbed import open_bed, rate_argument
from benchmarks.pictures import draw_steps
from benchmarks.prediction import Outlook, Schedules, judge, predict
from benchmarks.record import RESULTS, command_line, conditions, markdown, variant, write
from benchmarks.rounds import in_turn, not_reached, reason_of
from benchmarks.targets import targets
from benchmarks.workload import Workload, add_arguments, from_options, optimizer_of
from inductor_passes.costs.profiles import load_profile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simplefsdp.llama.model import Llama

_WARMUP_STEPS = 2
_LEAST_ROUNDS = 3
_CALIBRATION_TIMEOUT_S = 600.0


class Runner:
    """Runs steps of every contestant in this rank.

    Args:
        workload: what is trained.
        entrants: who takes part.
        limit_s: seconds from now after which no further contestant is set up, and again as many after which no further
            round begins.
    """

    def __init__(self, workload: Workload, entrants: Sequence[Contestant], limit_s: float) -> None:
        self.workload = workload
        self.mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.losses: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.setup_s: dict[str, float] = {}
        self.steps: dict[str, Callable[[], object]] = {}
        self._limit_s = limit_s
        self.batch = workload.tokens(dist.get_rank())
        model = workload.model()
        begin = time.perf_counter()
        self._add_compute_alone(model)
        self.steps[COMMUNICATION] = self._communication_alone(model)
        for contestant in entrants:
            if contestant.unavailable:
                self.failures[contestant.name] = contestant.unavailable
            elif self._overdue(begin):
                self.failures[contestant.name] = not_reached(limit_s)
            else:
                self._add(contestant, copy.deepcopy(model))

    def measure(self) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Seconds per step of every contestant in every round, of the slowest rank; and seconds of a core that the step
        kept busy, the machine's divided by the ranks."""
        names = list(self.steps)
        times: dict[str, list[float]] = {name: [] for name in names}
        busy: dict[str, list[float]] = {name: [] for name in names}
        start = time.perf_counter()
        for turn in range(self.workload.rounds):
            if turn >= _LEAST_ROUNDS and self._overdue(start):
                break
            _say(f"round {turn + 1} of {self.workload.rounds}")
            for name in in_turn(names, turn):
                dist.barrier()
                begin, before = time.perf_counter(), busy_s()
                for _ in range(self.workload.steps):
                    self.steps[name]()
                taken = (time.perf_counter() - begin) / self.workload.steps
                worked = (busy_s() - before) / self.workload.steps / self.mesh.size()
                times[name].append(_largest(taken))
                busy[name].append(_largest(worked))
        return times, busy

    def _overdue(self, begin: float) -> bool:
        return _largest(time.perf_counter() - begin) > self._limit_s

    def _add(self, contestant: Contestant, model: Llama) -> None:
        begin = time.perf_counter()
        try:
            step = self._training_step(contestant.name, model, contestant.build(model, self.mesh))
            for _ in range(_WARMUP_STEPS):
                step()
        except Exception as error:
            # Equal on every rank: what fails here fails while compiling.
            self.failures[contestant.name] = reason_of(error)
            return
        self.setup_s[contestant.name] = time.perf_counter() - begin
        self.steps[contestant.name] = step
        _say(f"{contestant.name}: set up in {self.setup_s[contestant.name]:.0f} s")

    def _training_step(self, name: str, model: nn.Module, forward: nn.Module) -> Callable[[], None]:
        optimizer = optimizer_of(list(model.parameters()))

        def step() -> None:
            loss = forward(*self.batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.losses[name] = loss.item()

        return step

    def _add_compute_alone(self, model: Llama) -> None:
        shards = [nn.Parameter(torch.empty(p.numel() // self.mesh.size())) for p in model.parameters()]
        for shard in shards:
            nn.init.zeros_(shard)
            shard.grad = torch.zeros_like(shard)
        optimizer = optimizer_of(shards)

        def step(copied: Llama) -> None:
            copied(*self.batch).backward()
            optimizer.step()
            copied.zero_grad()

        for name in (COMPUTE, EAGER_COMPUTE):
            copied = copy.deepcopy(model)
            if name == COMPUTE:
                copied.compile(fullgraph=True)
            self.steps[name] = functools.partial(step, copied)
            for _ in range(_WARMUP_STEPS):
                self.steps[name]()
        self.steps[OPTIMIZER] = optimizer.step

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


def work(workload: Workload, profile: str, only: Sequence[str], limit_s: float) -> None:
    """What every rank does; rank 0 prints the measurements as JSON."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    # Contestants share the model's code, and each is a recompilation of it.
    torch._dynamo.config.recompile_limit = 64
    lone = lone_times()
    runner = Runner(workload, entrants(workload, profile, only), limit_s)
    load = os.getloadavg()[0]
    times, busy = runner.measure()
    if dist.get_rank() == 0:
        found = {
            "times": times,
            "busy_s": busy,
            "lone": lone,
            "losses": runner.losses,
            "failures": runner.failures,
            "setup_s": runner.setup_s,
            "load": [load, os.getloadavg()[0]],
        }
        print(json.dumps(found))
    dist.destroy_process_group()


def entrants(workload: Workload, profile: str, only: Sequence[str]) -> list[Contestant]:
    """The contestants that were asked for: all when none were named."""
    return [
        contestant
        for contestant in contestants(Setting(workload.reshard, profile))
        if not only or contestant.name in only
    ]


def table(found: dict[str, Any]) -> list[str]:
    """The measurements as the lines of a Markdown table."""
    medians, busy = medians_of(found["times"]), medians_of(found["busy_s"])
    floor = max(medians[COMPUTE], medians[COMMUNICATION])
    rows = []
    for name, times in found["times"].items():
        low, high = min(times), max(times)
        loss = f"{found['losses'][name]:.6f}" if name in found["losses"] else ""
        setup = f"{found['setup_s'][name]:.0f}" if name in found["setup_s"] else ""
        spread = f"{low:.3f} to {high:.3f}"
        step, ratio = f"{medians[name]:.3f}", f"{medians[name] / floor:.2f}"
        rows.append((name, step, spread, ratio, f"{busy[name]:.3f}", loss, setup))
    rows += [(name, f"failed: {reason}", *[""] * 5) for name, reason in found["failures"].items()]
    head = (
        "",
        "step, s",
        "lowest to highest",
        "/ max(compute, communication)",
        "busy, s",
        "loss",
        "set-up, s",
    )
    return markdown(head, rows)


def medians_of(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Medians over rounds, by contestant."""
    return {name: statistics.median(times) for name, times in seconds.items()}


def record(
    workload: Workload,
    network: str,
    command: str,
    found: dict[str, Any],
    machine: Machine,
    outlook: Outlook,
    picture: str,
    profile: str,
) -> str:
    """The text of a result file; `profile` says which one planned and predicted."""
    medians = medians_of(found["times"])
    ratio = medians[COMMUNICATION] / medians[COMPUTE]
    rounds = len(found["times"][COMPUTE])
    predicted = [
        (item.name, f"{item.measured_s:.3f}", f"{item.predicted_s:.3f}", f"{item.error:+.0%}")
        for item in outlook.predictions
    ]
    lines = [
        f"# Training step, {network}",
        "",
        *conditions(command, found["load"]),
        *(f"- {line}" for line in workload.describe()),
        f"- {rounds} rounds of {workload.steps} steps; communication / compute = {ratio:.2f}",
        f"- compute and communication together keep all cores busy for {machine.floor_s:.3f} s: no step can be shorter",
        f"- forward and backward are planned each for itself: no plan takes less than {outlook.bound_s:.3f} s",
        "",
        f"![Step times]({picture})",
        "",
        *table(found),
        "",
        "## Targets",
        "",
        *markdown(("target", "at most", "measured", "verdict"), (item.row() for item in targets(medians))),
        "",
        "## Predicted and measured",
        "",
        _basis(profile, machine),
        "",
        *markdown(("", "measured, s", "predicted, s", "error"), predicted),
        "",
        judge(outlook.predictions) if outlook.predictions else "No contestant of this run has a prediction.",
        "",
    ]
    return "\n".join(lines)


def _basis(profile: str, machine: Machine) -> str:
    return (
        f"The simulator on the hardware profile {profile}; compute scaled to what it takes alone, compiled or not, and "
        f"while communication runs, which shares the cores, to {machine.pace:.0%} of that speed; collectives with "
        "nothing else in flight take as long as measured alone."
    )


def _say(text: str) -> None:
    """Tell whoever waits, once."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def _largest(value: float) -> float:
    """The largest of a number over all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--rate",
        type=rate_argument,
        help="bits per second of each link, for example 1gbit; loopback when not given",
    )
    add_only(parser)
    parser.add_argument(
        "--profile", help="hardware profile for planners and predictions; measured when not given"
    )
    parser.add_argument("--out", type=pathlib.Path, help=f"result file; in {RESULTS.name}/ when not given")
    parser.add_argument(
        "--limit", type=float, default=1500.0, help="seconds for setting up, and again for measuring"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    add_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Entry point; see the module docstring. Returns the exit code."""
    options = _parse(arguments)
    workload = from_options(options)
    if options.worker:
        work(workload, options.profile, options.only, options.limit)
        return 0
    command = command_line("train_step", arguments)
    kind = variant(workload.reshard, options.only)
    network = options.rate or "loopback"
    out = options.out or RESULTS / f"train_step_{options.ranks}_{network}_batch{workload.batch}_{kind}.md"
    with open_bed(options.ranks, options.rate) as bed, tempfile.TemporaryDirectory() as folder:
        profile = options.profile
        if profile is None:
            profile = os.path.join(folder, "measured.json")
            calibration = [sys.executable, "-m", "inductor_passes.costs.calibrate", "--out", profile]
            bed.run(calibration, _CALIBRATION_TIMEOUT_S)
        worker = [sys.executable, "-m", "benchmarks.train_step", *arguments, "--worker", "--profile", profile]
        # Twice the limit, and as much again for the contestant being set up and the window running when it passes.
        found = bed.result(worker, 3 * options.limit)
        found["profile"] = json.loads(load_profile(profile).to_json())
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(found) + "\n", encoding="utf-8")
        print("measured; predicting", file=sys.stderr)
        medians = medians_of(found["times"])
        cores = len(os.sched_getaffinity(0)) / options.ranks
        machine = machine_of(medians, medians_of(found["busy_s"]), cores, found["lone"])
        schedules = Schedules(workload, profile, options.ranks)
        outlook = predict(schedules, entrants(workload, profile, options.only), medians, machine)
        known = options.profile or "calibrated in this run"
        picture = out.with_suffix(".png")
        text = record(workload, bed.description, command, found, machine, outlook, picture.name, known)
    bars = {}
    for name, times in found["times"].items():
        if name != OPTIMIZER:
            bars[name] = (min(times), medians[name], max(times))
    title = f"{bed.description}: communication / compute = {medians[COMMUNICATION] / medians[COMPUTE]:.2f}"
    draw_steps(bars, max(medians[COMPUTE], medians[COMMUNICATION]), title, picture)
    write(out, text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
