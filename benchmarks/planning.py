"""How long planning takes, and how good the plans are by the model: Llama-shaped problems of growing size.

Run from the repository root: ``python -m benchmarks.planning [--layers 16 32 ...] [--ranks 8 64 ...]``.

Two tables. Speed: ``auto`` on forward and backward of a Llama with more and more layers, processor time, best
of ``--repeats``; the last column is the ratio to the row before. Quality: modelled step of every planner as a
percentage above the lower bound, and what the bound comes from. All steps are modelled with the named
hardware profile; nothing runs on a device.
"""

from __future__ import annotations

import argparse
import os
import platform
import time

from inductor_passes.planners import plan_collectives
from tests.inductor_passes.llama_problems import LLAMA_8B, LLAMA_70B, LLAMA_405B, Llama, llama_problem

PLANNERS = ("none", "block", "greedy", "auto")
SIZES = {"8b": LLAMA_8B, "70b": LLAMA_70B, "405b": LLAMA_405B}


def speed_table(layers: list[int], ranks: int, repeats: int, profile: str) -> None:
    """Print planning time by number of layers."""
    print(f"\nPlanning time of auto, {ranks} ranks, profile {profile}, processor seconds, best of {repeats}")
    print(f"{'layers':>7} {'collectives':>12} {'forward':>9} {'backward':>9} {'both':>8} {'ratio':>6}")
    before = None
    for count in layers:
        times = []
        collectives = 0
        for backward in (False, True):
            problem = llama_problem(
                Llama(count, 4096, 14336, 1024), ranks, backward=backward, profile=profile
            )
            collectives += len(problem.collectives)
            times.append(min(_seconds(problem) for _ in range(repeats)))
        both = sum(times)
        ratio = "" if before is None else f"{both / before:.2f}"
        print(f"{count:>7} {collectives:>12} {times[0]:>9.2f} {times[1]:>9.2f} {both:>8.2f} {ratio:>6}")
        before = both


def quality_table(names: list[str], ranks: list[int], budget_gb: float, profile: str) -> None:
    """Print modelled steps of all planners."""
    print(
        f"\nModelled step above the lower bound, budget {budget_gb} GB, profile {profile}, 8192 tokens per rank"
    )
    head = "".join(f"{name:>9}" for name in PLANNERS)
    print(f"{'model':>6} {'ranks':>6} {'graph':>9} {'bound ms':>9}{head} {'plan s':>7}  bound from")
    for name in names:
        for world in ranks:
            for backward in (False, True):
                tensor_parallel = 8 if name == "405b" else 1
                problem = llama_problem(
                    SIZES[name],
                    world,
                    backward=backward,
                    budget_gb=budget_gb,
                    profile=profile,
                    tensor_parallel=tensor_parallel,
                )
                plans = {planner: plan_collectives(problem, planner) for planner in PLANNERS[:-1]}
                begin = time.process_time()
                plans["auto"] = plan_collectives(problem, "auto")
                seconds = time.process_time() - begin
                bound = plans["auto"].lower_bound
                gaps = "".join(f"{100 * plans[p].step_ns / bound.time_ns - 100:>8.1f}%" for p in PLANNERS)
                graph = "backward" if backward else "forward"
                print(
                    f"{name:>6} {world:>6} {graph:>9} {bound.time_ns / 1e6:>9.1f}{gaps} {seconds:>7.2f}  {bound.limit}"
                )


def _seconds(problem: object) -> float:
    begin = time.process_time()
    plan_collectives(problem)  # type: ignore[arg-type]
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--models", nargs="+", choices=sorted(SIZES), default=["8b", "405b"])
    parser.add_argument("--budget-gb", type=float, default=4.0)
    parser.add_argument("--profile", default="h100_sxm")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} {platform.machine()} cores, load average {load:.1f}"
    )
    speed_table(options.layers, options.ranks[-1], options.repeats, options.profile)
    quality_table(options.models, options.ranks, options.budget_gb, options.profile)


if __name__ == "__main__":
    main()
