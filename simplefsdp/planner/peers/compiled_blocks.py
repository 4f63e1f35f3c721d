"""A step whose blocks are compiled one by one and whose rest runs in eager mode, from the facts of both.

Owns the mixture. Must not know FX, models or schedules: facts in, facts out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from simplefsdp.explainer.facts import BEFORE, GraphFacts, Value


def compile_blocks(eager: GraphFacts, compiled: GraphFacts) -> GraphFacts:
    """A step whose blocks are compiled one by one and whose rest runs in eager mode.

    Kernels of a block together take as long as in the compiled graph, each its share; what a checkpointing policy
    caches and backward does not read is not kept. Tensors inside a block are those of eager mode, which is too many
    while the block computes.

    Args:
        eager: forward or backward in eager mode.
        compiled: the same, compiled as one graph.
    """
    names = sorted({item.block for item in eager.problem.collectives if item.block is not None})
    where = _block_of_regions(eager, names)
    spent = _time_by_block(eager, where)
    allowed = _time_by_block(compiled, _block_of_regions(compiled, names))
    times, done, given = [], dict.fromkeys(spent, 0), dict.fromkeys(spent, 0)
    for block, duration in zip(where, eager.problem.region_ns, strict=True):
        if block is not None and allowed.get(block) and spent[block]:
            done[block] += duration
            share = allowed[block] * done[block] // spent[block] - given[block]
            given[block] += share
            times.append(share)
        else:
            times.append(duration)
    values = tuple(_read_only(value, len(times)) for value in eager.values)
    problem = dataclasses.replace(eager.problem, region_ns=tuple(times))
    return dataclasses.replace(eager, problem=problem, values=values)


def _read_only(value: Value, end: int) -> Value:
    """A tensor that is kept unread goes at once."""
    if not value.unread:
        return value
    return dataclasses.replace(value, dies=0 if value.born == BEFORE else value.born, unread=False)


def _block_of_regions(facts: GraphFacts, names: Sequence[str]) -> list[str | None]:
    """The block each region belongs to; what names no module between two regions of a block is of that block."""
    out: list[str | None] = []
    for region in facts.regions:
        parts = region.module.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        out.append(next((name for name in prefixes if name in names), None))
    inside = [at for at, block in enumerate(out) if block is not None]
    for at in range(inside[0], inside[-1]) if inside else ():
        out[at] = out[at] or out[at - 1]
    return out


def _time_by_block(facts: GraphFacts, where: Iterable[str | None]) -> dict[str, int]:
    out: dict[str, int] = {}
    for block, duration in zip(where, facts.problem.region_ns, strict=True):
        if block is not None:
            out[block] = out.get(block, 0) + duration
    return out
