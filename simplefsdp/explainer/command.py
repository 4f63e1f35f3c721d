"""`simplefsdp explain`: a model, a number of devices, a kind of hardware; out come tables and pictures.

Owns the options and the exit code.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from simplefsdp.llama.options import UsageError, answer

PROG = "simplefsdp explain"
EXIT_FAILURE = 1


@dataclasses.dataclass(frozen=True)
class ExplainOptions:
    """Show what the compiler passes make of one training step, and what it costs on modelled hardware. Nothing runs."""

    model: str = "debug"
    """A Llama (debug, 1b, 8b, 70b, 405b), or module:function, which returns (model, inputs)."""
    gpus: int = 8
    """Devices of the imagined run."""
    hardware: str = "h100"
    """h100, h200, a100, b200, cpu, or a profile file that ends in .json."""
    sharding_factor: int | None = None
    """Ranks that share one copy of the parameters: 1 replicates (DDP); default all (FSDP)."""
    seq: int | None = None
    """Tokens per sequence of a Llama. Default: 8192, or the most it can."""
    local_batch: int = 1
    """Sequences per device of a Llama."""
    ac: Literal["none", "full", "selective"] = "none"
    """Activation checkpointing of a Llama."""
    layers: int | None = None
    """Build a Llama with this many blocks: quicker, and the picture is easier to read."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 compute with fp32 storage and reductions, or fp32."""
    planner: Literal["auto", "greedy", "block", "none"] = "auto"
    """Who decides buckets and places."""
    blocks: tuple[str, ...] = ()
    """Modules that make a bucket each with --planner block. Default for a Llama: layers.*"""
    memory_budget_gb: float = 4.0
    """What prefetching may hold in flight, in 10**9 bytes."""
    reshard_after_forward: bool = True
    """Free gathered parameters after forward and gather them again in backward."""
    out: Path = Path("explain")
    """Directory for report.txt, schedule.html, schedule.png, trace.json and the graphs before and after each pass."""
    png: bool = True
    """Draw schedule.png, which needs matplotlib."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the options; `None` takes them from `sys.argv`.

    Returns:
        The exit code: 0 success, 1 the model cannot be traced, 2 bad input.
    """
    return answer(ExplainOptions, argv, _run, prog=PROG)


def _run(options: ExplainOptions) -> int:
    # Not at the top: a mistyped option is answered before torch is imported.
    from simplefsdp.explainer.api import explain
    from simplefsdp.explainer.hardware import find_hardware
    from simplefsdp.explainer.target import find_target
    from simplefsdp.explainer.trace_errors import TraceError, explain_failure
    from simplefsdp.explainer.wrapping import wrap_options

    try:
        hardware = find_hardware(options.hardware)
        wrap = wrap_options(
            gpus=options.gpus,
            sharding_factor=options.sharding_factor,
            precision=options.precision,
            planner=options.planner,
            blocks=options.blocks or ("layers.*",),
            memory_budget_gb=options.memory_budget_gb,
            reshard_after_forward=options.reshard_after_forward,
            profile=hardware.profile,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    target = find_target(
        options.model,
        seq_len=options.seq,
        local_batch=options.local_batch,
        checkpointing=options.ac,
        layers=options.layers,
    )
    try:
        with explain_failure(target.name):
            report = explain(target.model, *target.inputs, ranks=options.gpus, wrap=wrap, title=target.name)
    except TraceError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    try:
        files = report.save(options.out, picture=options.png)
    except ImportError as error:
        raise UsageError(f"{error}, or leave the picture out with --no-png") from error
    except OSError as error:
        raise UsageError(f"--out {options.out}: {error.strerror or error}") from error
    print(report)
    print()
    print("\n".join(map(str, files)))
    return 0
