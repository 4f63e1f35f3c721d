"""`simplefsdp explain`: a model, a number of devices, a kind of hardware; out come tables and pictures.

Owns the options and the exit code.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from simplefsdp.exits import EXIT_FAILURE
from simplefsdp.explainer.options import StepOptions, check_directory
from simplefsdp.llama.options import UsageError, answer

PROG = "simplefsdp explain"


@dataclasses.dataclass(frozen=True)
class ExplainOptions(StepOptions):
    """Show what the compiler passes make of one training step, and what it costs on modelled hardware. Nothing runs."""

    planner: Literal["auto", "greedy", "block", "none"] = "auto"
    """Who decides buckets and places."""
    blocks: tuple[str, ...] = ()
    """Modules that make a bucket each with --planner block. Default for a Llama: layers.*"""
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
    options.check()
    check_directory("--out", options.out)

    # Not at the top: mistakes are answered before torch is imported.
    from simplefsdp.explainer.api import explain
    from simplefsdp.explainer.hardware import find_hardware
    from simplefsdp.explainer.target import find_target
    from simplefsdp.explainer.trace_errors import TraceError, explain_failure
    from simplefsdp.explainer.wrapping import block_patterns, wrap_options

    hardware = find_hardware(options.hardware)
    try:
        hardware.load()
    except ValueError as error:
        raise UsageError(f"--hardware: {error}") from error
    try:
        target = find_target(
            options.model,
            seq_len=options.seq,
            local_batch=options.local_batch,
            checkpointing=options.ac or "none",
            layers=options.layers,
        )
        wrap = wrap_options(
            gpus=options.gpus,
            sharding_factor=options.sharding_factor,
            precision=options.precision,
            planner=options.planner,
            blocks=options.blocks or block_patterns(target.model),
            memory_budget_gb=options.memory_budget_gb,
            reshard_after_forward=options.reshard_after_forward,
            profile=hardware.profile,
        )
        with explain_failure(target.name):
            report = explain(target.model, *target.inputs, ranks=options.gpus, wrap=wrap, title=target.name)
        if next(target.model.parameters(), None) is None:
            raise TraceError(f"{target.name} has no parameters: there is nothing to shard or explain")
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
