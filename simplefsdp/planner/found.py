"""The findings of a search as text, and the command that repeats the winner.

Owns the words and columns of `simplefsdp plan --search`. Must not know how a search goes.
"""

from __future__ import annotations

import dataclasses
import shlex

from simplefsdp.explainer.hardware import GIB, Hardware
from simplefsdp.planner.options import PlanOptions
from simplefsdp.planner.search import Candidate, Findings, describe
from simplefsdp.planner.text import SPEED_HEAD, speed_cells, table

MOST_MISFITS = 6


def findings_text(findings: Findings, options: PlanOptions, hardware: Hardware) -> str:
    """The best choices, what did not fit, notes, and the winner's command."""
    assert hardware.memory_bytes is not None
    usable = findings.usable_bytes
    room = (
        f"may use {usable / GIB:.1f} of {hardware.memory_bytes / GIB:.0f} GiB ({hardware.source}); the rest is left to "
        "fragments and NCCL's own buffers, which are not modelled"
    )
    lines = [room, ""]
    if findings.best:
        lines += [_table(findings, options), ""]
    misfits = findings.misfits[:MOST_MISFITS]
    if misfits:
        lines.append("does not fit:")
    lines += [
        f"  {describe(item, options.is_own_model)}: {item.total_bytes / GIB:.1f} GiB, "
        f"{(item.total_bytes - usable) / GIB:.1f} too many"
        for item in misfits
    ]
    lines += findings.notes
    if findings.best:
        lines += ["", f"best: {command_of(findings.best[0], options)}"]
    else:
        lines += ["", "nothing fits: more devices, shorter sequences or devices with more memory"]
    return "\n".join(lines)


def _table(findings: Findings, options: PlanOptions) -> str:
    own = options.is_own_model
    choices = ("sharded over", "resharded", "planner")
    head = (
        *(() if own else ("checkpointing", "batch")),
        *choices,
        "step ms",
        "exposed",
        *SPEED_HEAD,
    )
    rows = []
    for item in findings.best:
        prediction = item.prediction
        rows.append(
            (
                *(() if own else (item.mode, str(item.batch))),
                str(item.factor),
                "yes" if item.reshard else "no",
                prediction.planner,
                f"{prediction.step_ns / 1e6:.1f}",
                f"{prediction.exposed_ns / prediction.step_ns:.1%}",
                *speed_cells(prediction.tokens_per_s, prediction.mfu),
                f"{prediction.memory.total_bytes / GIB:.1f}",
            )
        )
    return table((*head, "peak GiB"), rows)


def command_of(winner: Candidate, options: PlanOptions) -> str:
    """The command that predicts a choice alone."""
    words = ["simplefsdp", "plan", "--model", options.model, "--gpus", str(options.gpus)]
    words += ["--hardware", options.hardware, "--sharding-factor", str(winner.factor)]
    if not options.is_own_model:
        words += ["--local-batch", str(winner.batch), "--ac", winner.mode]
    words += ["--planners", winner.prediction.planner]
    if not winner.reshard:
        words.append("--no-reshard-after-forward")
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for name in ("seq", "layers", "precision", "memory_budget_gb", "memory_gib"):
        value = getattr(options, name)
        if value != defaults[name]:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join([*words, *(["--whole"] if options.whole else [])])
