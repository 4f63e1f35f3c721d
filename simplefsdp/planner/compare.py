"""The same step by other implementations, predicted: rows beside those of our planners.

Owns the choice of peers and what each runs: eager kernels, compiled blocks, or the compiled graph. Must not know how
the rows are shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.costs.profiles import HardwareProfile
from simplefsdp.explainer.facts import GraphFacts
from simplefsdp.planner.peers import (
    FSDP2_COMPILED,
    FSDP2_EAGER,
    NotModelledError,
    compile_blocks,
    plan_fsdp2,
    plan_stock_manual,
)
from simplefsdp.planner.predict import Prediction, predict

PEERS_NOTE = (
    "Rows named FSDP2 and Inductor: the schedules of others, modelled in the same simulator, with the same times. With "
    "FSDP2 what is in no block, the loss for one, runs in eager mode."
)


def predict_peers(
    graphs: Sequence[GraphFacts],
    eager: Sequence[GraphFacts],
    profile: HardwareProfile,
    shard_bytes: int,
    *,
    tokens: int | None = None,
    flops_per_token: float | None = None,
) -> list[Prediction]:
    """Predict a step as FSDP2 runs it, eager and with compiled blocks, and as Inductor's stock passes schedule it.

    Args:
        graphs: forward and backward, compiled.
        eager: forward and backward in eager mode; empty leaves FSDP2 out.
        profile, shard_bytes, tokens, flops_per_token: as in `predict`.

    Returns:
        One prediction for each peer, or none where their schedules are not modelled: other communication than gathers
        and reduce-scatters over one group, graph breaks, parameters that stay gathered after forward.
    """
    if [facts.kind for facts in graphs] != ["forward", "backward"]:
        return []
    try:
        rows: list[tuple[Sequence[GraphFacts], bool]] = [(tuple(map(plan_stock_manual, graphs)), False)]
        if eager:
            one, other = eager
            forward, backward = map(compile_blocks, eager, graphs)
            rows = [
                (plan_fsdp2(one, other, FSDP2_EAGER), True),
                (plan_fsdp2(forward, backward, FSDP2_COMPILED), True),
                *rows,
            ]
    except NotModelledError:
        return []
    return [
        predict(
            planned,
            profile,
            shard_bytes,
            tokens=tokens,
            flops_per_token=flops_per_token,
            own_streams=own_streams,
        )
        for planned, own_streams in rows
    ]
