"""`simplefsdp plan`: what a run would show on hardware that is not there.

Owns the options and the exit code.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from simplefsdp.llama.options import UsageError, answer

if TYPE_CHECKING:
    from inductor_passes.costs.profiles import HardwareProfile
    from simplefsdp.explainer.target import Target
    from simplefsdp.planner.build import Traced

PROG = "simplefsdp plan"
EXIT_FAILURE = 1


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Predict speed and memory of one training step on hardware that is not there. Nothing runs; all is modelled."""

    model: str = "8b"
    """A Llama (debug, 1b, 8b, 70b, 405b), or module:function, which returns (model, inputs)."""
    gpus: int = 64
    """Devices of the imagined run."""
    hardware: str = "h100"
    """h100, h100-96gb, h200, a100, b200, cpu, or a profile file that ends in .json."""
    sharding_factor: int | None = None
    """Ranks that share one copy of the parameters: 1 replicates (DDP); default all (FSDP)."""
    seq: int | None = None
    """Tokens per sequence of a Llama. Default: 8192, or the most it can."""
    local_batch: int = 1
    """Sequences per device of a Llama."""
    ac: Literal["none", "full", "selective"] = "selective"
    """Activation checkpointing of a Llama."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 compute with fp32 storage and reductions, or fp32."""
    planners: tuple[Literal["auto", "greedy", "block", "none"], ...] = ("none", "block", "greedy", "auto")
    """Planners to compare. block gathers a block ahead, as FSDP2 does in eager mode."""
    memory_budget_gb: float = 4.0
    """What prefetching may hold in flight, in 10**9 bytes."""
    reshard_after_forward: bool = True
    """Free gathered parameters after forward and gather them again in backward."""
    whole: bool = False
    """Trace every layer instead of a few, which takes long."""
    scale: bool = False
    """Also show 8 to 4096 devices, each with the same batch, fully sharded, by the last of --planners."""
    plot: Path | None = None
    """Draw what --scale shows to this file."""
    validate: bool = False
    """Print predictions beside published measurements instead; other options do not count."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the options; `None` takes them from `sys.argv`.

    Returns:
        The exit code: 0 success, 1 the model cannot be traced, 2 bad input.
    """
    return answer(PlanOptions, argv, _run, prog=PROG)


def _run(options: PlanOptions) -> int:
    # Not at the top: a mistyped option is answered before torch is imported.
    from simplefsdp.explainer.hardware import find_hardware
    from simplefsdp.explainer.target import find_target
    from simplefsdp.explainer.trace_errors import TraceError, explain_failure
    from simplefsdp.planner.build import trace
    from simplefsdp.planner.predict import predict
    from simplefsdp.planner.text import memory_text, planners_text
    from simplefsdp.planner.validation import validation_text

    if options.validate:
        print(validation_text())
        return 0
    if options.plot is not None and not options.scale:
        raise UsageError("--plot draws what --scale shows: give both")
    if not options.planners:
        raise UsageError("--planners: name at least one of auto, greedy, block, none")
    try:
        hardware = find_hardware(options.hardware)
    except ValueError as error:
        raise UsageError(str(error)) from error
    target = find_target(
        options.model, seq_len=options.seq, local_batch=options.local_batch, checkpointing=options.ac
    )
    try:
        with explain_failure(target.name):
            traced = trace(
                target,
                hardware,
                gpus=options.gpus,
                sharding_factor=options.sharding_factor,
                precision=options.precision,
                planner=options.planners[-1],
                memory_budget_gb=options.memory_budget_gb,
                reshard_after_forward=options.reshard_after_forward,
                whole=options.whole,
            )
    except ValueError as error:
        raise UsageError(str(error)) from error
    except TraceError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    profile = hardware.load()
    predictions = [
        predict(
            traced.graphs,
            profile,
            traced.shard_bytes,
            planner=planner,
            tokens=target.tokens,
            flops_per_token=target.flops_per_token,
        )
        for planner in options.planners
    ]
    best = min(predictions, key=lambda item: item.step_ns)
    forward_backward = " + ".join(f"{line.kind} {line.step_ns / 1e6:.1f}" for line in best.timelines)
    print(
        f"{target.name} on {options.gpus} {hardware.name}, sharded over {options.sharding_factor or options.gpus}, "
        f"activation checkpointing {options.ac}; modelled, hardware profile {profile.name}; {traced.note}"
    )
    print("\n".join(f"warning: {line}" for line in traced.warnings), end="\n" if traced.warnings else "")
    print()
    print(planners_text(predictions))
    print()
    print(f"best: {best.planner}, ms: {forward_backward} + optimizer {best.optimizer_ns / 1e6:.1f}")
    print(memory_text(best.memory, hardware))
    if options.scale:
        print(f"\n{_scale(options, target, traced, profile)}")
    return 0


def _scale(options: PlanOptions, target: Target, traced: Traced, profile: HardwareProfile) -> str:
    """The scaling table; draws it if asked to."""
    from simplefsdp.planner.predict import predict
    from simplefsdp.planner.scale import DEVICES, ScalePoint, plot_scaling, rescale, scaling_text

    points = []
    try:
        for devices in DEVICES:
            graphs = [rescale(facts, profile, devices) for facts in traced.graphs]
            stored = -(-traced.shard_bytes * options.gpus // devices)
            prediction = predict(
                graphs, profile, stored, tokens=target.tokens, flops_per_token=target.flops_per_token
            )
            points.append(ScalePoint(devices, prediction))
    except ValueError as error:
        raise UsageError(f"--scale: {error}; leave out --sharding-factor") from error
    title = f"{target.name}, fully sharded, planner {options.planners[-1]}; modelled, hardware profile {profile.name}"
    if options.plot is not None:
        try:
            plot_scaling(points, title, options.plot)
        except (ImportError, OSError, ValueError) as error:
            raise UsageError(f"--plot {options.plot}: {error}") from error
    return f"{title}\n{scaling_text(points)}"
