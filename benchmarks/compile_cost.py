"""What compilation costs as models grow: the first step with an empty cache, with a full one, and the passes' part.

    python -m benchmarks.compile_cost --layers 4 8 16 32 64

Each row is a process of its own that plays one rank of a process group whose collectives do nothing, and whose compile
cache lies in a folder of its own: "cold" is the first process in that folder, "warm" the second. "first step" is
forward, backward and optimizer, compilation included; "passes" is what our passes took of it. "graphs" counts what
Dynamo handed to the compiler, "kernels" the C++ files the cold process compiled: where equal blocks are compiled once,
neither grows with the layers. A process that reaches `--limit` ends its contestant's column.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.contestants import Setting, contestants
from benchmarks.names import AUTO, CONTESTANTS, FSDP2_COMPILED, NO_PASSES, add_only
from benchmarks.netbed import Bed, RankFailure, open_bed
from benchmarks.record import RESULTS, command_line, conditions, markdown, write
from benchmarks.workload import Workload, add_arguments, from_options, optimizer_of
from inductor_passes.hooks import JointHook, PostGradHook, ReorderHook
from simplefsdp import simple_fsdp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from simplefsdp.llama.model import Llama

OURS_BY_BLOCK = "ours, compiled blocks"
NAMES = (AUTO, NO_PASSES, OURS_BY_BLOCK, FSDP2_COMPILED)
_BY_BLOCK = (OURS_BY_BLOCK, FSDP2_COMPILED)
LAYERS = (4, 8, 16, 32, 64)
_SMALL = Workload(dim=64, ffn_dim=128, vocab_size=256, batch=1, sequence=32)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of one process, in seconds and counts."""

    first_s: float
    passes_s: float
    graphs: int
    kernels: int


def work(workload: Workload, name: str, ranks: int, profile: str) -> Cost:
    """Take the first step of one contestant in this process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    folder = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    known = _sources(folder)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        model, batch = workload.model(), workload.tokens(0)
        forward = _build(name, Setting(workload.reshard, profile))(model, init_device_mesh("cpu", (ranks,)))
        optimizer = optimizer_of(list(model.parameters()))
        with time_of_passes() as passes:
            begin = time.perf_counter()
            forward(*batch).backward()
            optimizer.step()
            first_s = time.perf_counter() - begin
    finally:
        dist.destroy_process_group()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return Cost(first_s, sum(passes), graphs, len(_sources(folder) - known))


@contextlib.contextmanager
def time_of_passes() -> Iterator[list[float]]:
    """Seconds of every call of a pass of ours in the block, as they come in."""
    seconds: list[float] = []
    hooks: tuple[Any, ...] = (JointHook, PostGradHook, ReorderHook)
    originals = [hook.__call__ for hook in hooks]

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - begin)

        return call

    for hook, original in zip(hooks, originals, strict=True):
        hook.__call__ = timed(original)
    try:
        yield seconds
    finally:
        for hook, original in zip(hooks, originals, strict=True):
            hook.__call__ = original


def _build(name: str, setting: Setting) -> Callable[[Llama, DeviceMesh], nn.Module]:
    if name != OURS_BY_BLOCK:
        return next(item.build for item in contestants(setting) if item.name == name)

    def build(model: Llama, mesh: DeviceMesh) -> nn.Module:
        simple_fsdp(model, mesh, reshard_after_forward=setting.reshard)
        for layer in model.layers:
            layer.compile(fullgraph=True)
        return model

    return build


def _sources(folder: pathlib.Path) -> set[str]:
    return {str(path) for path in folder.rglob("*.main.cpp")}


def measure(
    bed: Bed, name: str, layers: int, arguments: Sequence[str], limit_s: float
) -> tuple[Cost, Cost] | str:
    """Cold and warm cost of one contestant, or why there is none."""
    worker = [sys.executable, "-m", "benchmarks.compile_cost", *arguments]
    worker += ["--worker", name, "--layers", str(layers)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in ("cold", "warm"):
            try:
                cost = bed.result(["env", f"TORCHINDUCTOR_CACHE_DIR={folder}", *worker], limit_s)
            except RankFailure as error:
                return str(error).splitlines()[0]
            found.append(Cost(**cost))
    return found[0], found[1]


def record(
    workload: Workload,
    command: str,
    load: Sequence[float],
    ranks: int,
    found: dict[str, dict[int, tuple[Cost, Cost] | str]],
) -> str:
    """The text of a result file."""
    rows: list[Sequence[object]] = []
    for name, by_layers in found.items():
        for layers, costs in by_layers.items():
            if isinstance(costs, str):
                rows.append((name, layers, costs, *[""] * 5))
                continue
            cold, warm = costs
            rows.append(
                (
                    *(name, layers, f"{cold.first_s:.1f}", f"{warm.first_s:.1f}"),
                    *(f"{cold.passes_s:.2f}", f"{warm.passes_s:.2f}", cold.graphs, cold.kernels),
                )
            )
    head = ("", "layers", "first step cold, s", "warm, s", "passes cold, s", "warm, s", "graphs", "kernels")
    return "\n".join(
        [
            f"# Compilation of one rank of {ranks}, C++ backend",
            "",
            *conditions(command, load),
            f"- Llama of width {workload.dim}, {workload.batch} x {workload.sequence} tokens, collectives do nothing",
            "",
            *markdown(head, rows),
            "",
            *dedup(found),
            "",
        ]
    )


def dedup(found: dict[str, dict[int, tuple[Cost, Cost] | str]]) -> list[str]:
    """What is compiled once for equal blocks, by contestant, from the first and the last number of layers."""
    lines = []
    for name, by_layers in found.items():
        known = {layers: costs[0] for layers, costs in by_layers.items() if not isinstance(costs, str)}
        if len(known) < 2:
            continue
        (few, first), *_, (many, last) = sorted(known.items())
        if name not in _BY_BLOCK:
            what = "one graph holds every block; equal kernels are compiled once"
        elif last.graphs == first.graphs:
            what = "equal blocks are compiled once"
        else:
            what = "equal blocks are compiled again"
        lines.append(
            f"- {name}, {few} to {many} layers: {first.graphs} to {last.graphs} graphs, {first.kernels} to "
            f"{last.kernels} kernels: {what}"
        )
    return lines


def main(arguments: list[str]) -> int:
    """Entry point; see the module docstring. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compile_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",
    )
    add_arguments(parser, _SMALL, timed=False)
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--profile", default="cpu_gloo", help="hardware profile of the planners")
    add_only(parser, (*CONTESTANTS, OURS_BY_BLOCK), NAMES)
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for each process")
    parser.add_argument("--out", type=pathlib.Path, help=f"result file; in {RESULTS.name}/ when not given")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    layers: list[int] = options.layers
    options.layers = layers[0]
    workload = from_options(options)
    if options.worker:
        print(json.dumps(dataclasses.asdict(work(workload, options.worker, options.ranks, options.profile))))
        return 0
    before = os.getloadavg()[0]
    found: dict[str, dict[int, tuple[Cost, Cost] | str]] = {}
    with open_bed(1, None) as bed:
        for name in options.only or NAMES:
            column = found.setdefault(name, {})
            for count in sorted(layers):
                column[count] = measure(bed, name, count, arguments, options.limit)
                print(f"{name}, {count} layers: {column[count]}", file=sys.stderr)
                if isinstance(column[count], str):
                    break
    command = command_line("compile_cost", arguments)
    load = before, os.getloadavg()[0]
    write(options.out or RESULTS / "compile_cost.md", record(workload, command, load, options.ranks, found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
