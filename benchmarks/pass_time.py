"""How long the passes take on graphs of growing size: forward and backward of a Llama together.

Run from the repository root: ``python -m benchmarks.pass_time [--blocks 1 4 8 16 32] [--ranks 64]``.

Each row traces a Llama of that many blocks on a fake process group, once, with fake tensors, and times what the
hooks do to its two graphs: naming, re-gathering, reading, planning, moving compute, rewriting, verifying. The pass over
scheduler nodes is not in it: it needs lowered graphs. Time is processor time of one run, the best of ``--repeats``;
`nodes` counts both graphs before the passes; the last column is time per node relative to the row before, raised to a
doubling: 2 means linear.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import math
import os
import platform
import pstats
import time

import torch
from torch import fx, nn

from inductor_passes import PassConfig, _compat
from inductor_passes.hooks import JointHook, PostGradHook
from inductor_passes.install import make_setup
from simplefsdp import simple_fsdp
from tests.helpers.worlds import fake_process_group
from tests.inductor_passes.toy import BF16, DIM, SEQUENCE, Block


class _Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def graphs(blocks: int, hook: JointHook) -> tuple[list[fx.GraphModule], float]:
    """Forward and backward graph of a model, as the post-grad passes see them, and seconds of the joint pass."""
    found: list[fx.GraphModule] = []
    seconds = 0.0

    def partition(joint: fx.GraphModule, inputs: object, **arguments: object) -> object:
        nonlocal seconds
        begin = time.process_time()
        hook(joint.graph)
        seconds += time.process_time() - begin
        return _compat.min_cut_partition(joint, inputs, **arguments)  # type: ignore[arg-type]

    def keep(gm: fx.GraphModule, inputs: object) -> object:
        found.append(gm)
        return gm.forward

    backend = _compat.aot_autograd_backend(keep, keep, keep, partition)
    torch._dynamo.reset()
    model = simple_fsdp(_Blocks(blocks), mp_policy=BF16)
    x = torch.randn(2, SEQUENCE, DIM, requires_grad=True)
    torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    return found, seconds


def measure(modules: list[fx.GraphModule], config: PassConfig) -> float:
    """Processor seconds of the post-grad passes on copies of both graphs."""
    hook = PostGradHook((make_setup(config),), pinned=True)
    fresh = [copy.deepcopy(module) for module in modules]
    begin = time.process_time()
    for module in fresh:
        hook(module.graph)
    seconds = time.process_time() - begin
    failures = [record.failure for record in hook.records if record.failure]
    if failures:
        raise RuntimeError(f"a pass failed: {failures}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="print where the time of the last row goes")
    options = parser.parse_args()
    config = PassConfig(profile="h100_sxm")
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} {platform.machine()} cores, "
        f"load average {os.getloadavg()[0]:.1f}; planner {config.planner}, {options.ranks} ranks"
    )
    print(
        f"{'blocks':>7} {'nodes':>7} {'trace s':>8} {'joint s':>8} {'post-grad s':>12} {'both s':>7} {'doubling':>9}"
    )
    before: tuple[int, float] | None = None
    modules: list[fx.GraphModule] = []
    with fake_process_group(0, options.ranks):
        for blocks in options.blocks:
            begin = time.process_time()
            modules, joint = graphs(blocks, JointHook((make_setup(config),), pinned=True))
            trace = time.process_time() - begin - joint
            nodes = sum(len(module.graph.nodes) for module in modules)
            after = min(measure(modules, config) for _ in range(options.repeats))
            both = joint + after
            ratio = ""
            if before is not None:
                ratio = f"{2 ** (math.log(both / before[1]) / math.log(nodes / before[0])):.2f}"
            print(
                f"{blocks:>7} {nodes:>7} {trace:>8.1f} {joint:>8.2f} {after:>12.2f} {both:>7.2f} {ratio:>9}",
                flush=True,
            )
            before = (nodes, both)
        if options.profile:
            profiler = cProfile.Profile()
            profiler.enable()
            measure(modules, config)
            profiler.disable()
            pstats.Stats(profiler).sort_stats("cumtime").print_stats(45)


if __name__ == "__main__":
    main()
