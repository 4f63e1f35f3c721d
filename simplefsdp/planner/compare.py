"""The same step by other implementations, predicted: rows beside those of our planners.

Owns the choice of peers for each way to share parameters, and what each runs: eager kernels, compiled blocks, or the
compiled graph. Must not know how the rows are shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from inductor_passes.costs.profiles import HardwareProfile
from simplefsdp.explainer.facts import GraphFacts
from simplefsdp.explainer.runs import Run
from simplefsdp.planner.peers import (
    DDP_COMPILED,
    DDP_EAGER,
    FSDP2_COMPILED,
    FSDP2_EAGER,
    STOCK_MANUAL,
    STOCK_OVERLAP,
    NotModelledError,
    Sharing,
    bucket_cap,
    compile_blocks,
    plan_ddp,
    plan_fsdp2,
    plan_stock_manual,
    plan_stock_overlap,
    ranks_of_shards,
    sharing_of,
)
from simplefsdp.planner.predict import Prediction, Stored, predict

Pair = tuple[GraphFacts, GraphFacts]

_NOTES = {
    Sharing.FULL: "With FSDP2 what is in no block, the loss for one, runs in eager mode.",
    Sharing.HYBRID: "With FSDP2 what is in no block, the loss for one, runs in eager mode. Inductor by block waits for "
    "the all-reduces of a block as soon as they have started.",
    Sharing.REPLICATED: "DDP keeps its buckets beside the gradients (gradient_as_bucket_view is off, as it is unless "
    "set).",
}


@dataclasses.dataclass(frozen=True)
class Peers:
    """What others would do with a step.

    Args:
        predictions: one for each peer whose schedule is modelled.
        note: one line on what they are, "" without any.
        left_out: peers whose schedule is not modelled for this step, with the reason.
    """

    predictions: tuple[Prediction, ...]
    note: str
    left_out: tuple[tuple[str, str], ...] = ()

    def lines(self) -> list[str]:
        """The note, and what is left out, for reading."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.left_out)
        return [
            *([self.note] if self.note else []),
            *([f"not modelled for others: {reasons}"] if reasons else []),
        ]


def predict_peers(
    graphs: Sequence[GraphFacts],
    eager: Sequence[GraphFacts],
    profile: HardwareProfile,
    stored: Stored,
    *,
    runs: Sequence[Run] | None = None,
    tokens: int | None = None,
    flops_per_token: float | None = None,
) -> Peers:
    """Predict a step as FSDP2 or DDP runs it, eager and with compiled blocks, and as Inductor's own passes schedule it.

    Args:
        graphs: forward and backward, compiled.
        eager: forward and backward in eager mode; empty leaves FSDP2 and DDP out.
        profile, stored, runs, tokens, flops_per_token: as in `predict`.

    Returns:
        The peers of the way the step shares its parameters: fully sharded and hybrid, FSDP2 and Inductor's two
        schedules; replicated, DDP and Inductor's overlap scheduling. What is not modelled is named with the reason.
    """
    order = range(len(graphs)) if runs is None else [run.graph for run in runs]
    if [graphs[number].kind for number in order] != ["forward", "backward"]:
        kinds = ", ".join(graphs[number].kind for number in order)
        return Peers(
            (), "", (("all", f"a step is one forward and one backward, here it is {kinds or 'nothing'}"),)
        )
    forward, backward = graphs
    try:
        sharing = sharing_of(forward, backward)
    except NotModelledError as error:
        return Peers((), "", (("all", str(error)),))
    rows: list[Prediction] = []
    left_out: list[tuple[str, str]] = []
    for name, plan, own_streams in _peers((forward, backward), eager, profile, sharing):
        try:
            planned = plan()
        except NotModelledError as error:
            left_out.append((name, str(error)))
            continue
        rows.append(
            predict(
                planned,
                profile,
                stored,
                tokens=tokens,
                flops_per_token=flops_per_token,
                own_streams=own_streams,
            )
        )
    first = "DDP" if sharing is Sharing.REPLICATED else "FSDP2"
    note = (
        f"Rows named {first} and Inductor: the schedules of others, modelled in the same simulator, with the same "
        f"times. {_NOTES[sharing]}"
    )
    return Peers(tuple(rows), note if rows else "", tuple(left_out))


def _peers(
    compiled: Pair, eager: Sequence[GraphFacts], profile: HardwareProfile, sharing: Sharing
) -> list[tuple[str, Callable[[], Pair], bool]]:
    """Name, rules, and whether collectives allocate on streams of their own."""

    def in_eager_mode() -> Pair:
        if len(eager) != len(compiled):
            raise NotModelledError("eager mode cannot be read off this step")
        return eager[0], eager[1]

    def in_compiled_blocks() -> Pair:
        forward, backward = map(compile_blocks, in_eager_mode(), compiled)
        return forward, backward

    def by_block() -> Pair:
        forward, backward = (plan_stock_manual(facts, sharing) for facts in compiled)
        return forward, backward

    def by_overlap() -> Pair:
        ranks = ranks_of_shards(*compiled)
        cap_bytes = None if ranks is None else bucket_cap(profile, ranks)
        forward, backward = (plan_stock_overlap(facts, cap_bytes) for facts in compiled)
        return forward, backward

    stock: list[tuple[str, Callable[[], Pair], bool]] = [
        (STOCK_MANUAL, by_block, False),
        (STOCK_OVERLAP, by_overlap, False),
    ]
    if sharing is Sharing.REPLICATED:
        return [
            (DDP_EAGER, lambda: plan_ddp(*in_eager_mode(), DDP_EAGER), False),
            (DDP_COMPILED, lambda: plan_ddp(*in_compiled_blocks(), DDP_COMPILED, compiled=True), False),
            *stock,
        ]
    return [
        (FSDP2_EAGER, lambda: plan_fsdp2(*in_eager_mode(), FSDP2_EAGER), True),
        (FSDP2_COMPILED, lambda: plan_fsdp2(*in_compiled_blocks(), FSDP2_COMPILED), True),
        *stock,
    ]
