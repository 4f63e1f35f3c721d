"""What tables call the measured things. Owns the words that several scripts must agree on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

COMPUTE, COMMUNICATION, OPTIMIZER = "compute alone", "communication alone", "optimizer alone"
EAGER_COMPUTE = "compute alone, eager"

DDP = "DDP"
FSDP2 = "FSDP2 eager"
FSDP2_COMPILED = "FSDP2, compiled blocks"
EAGER, NO_PASSES = "ours, eager", "ours, no passes"
STOCK_OVERLAP, STOCK_BLOCKS = "stock overlap scheduling", "stock per-block bucketing"
STOCK = (STOCK_OVERLAP, STOCK_BLOCKS)
PLANNED = {planner: f"ours, {planner}" for planner in ("none", "block", "greedy", "auto")}
NONE, AUTO = PLANNED["none"], PLANNED["auto"]
UNCOMPILED = (DDP, FSDP2, EAGER)
"""Contestants whose compute is that of eager mode."""
CONTESTANTS = (DDP, FSDP2, FSDP2_COMPILED, EAGER, NO_PASSES, *PLANNED.values(), STOCK_BLOCKS, STOCK_OVERLAP)


def add_only(
    parser: argparse.ArgumentParser, known: Sequence[str] = CONTESTANTS, default: Sequence[str] = ()
) -> None:
    """Add `--only`, names of contestants; an unknown one is an error that lists the known."""
    usual = ", ".join(default) or "all"
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=known,
        metavar="NAME",
        help=f"contestants; {usual} when not given",
    )
