"""A graph as text that can be compared: one line per collective and compute region, no node names.

Owns the form of a line. Must not know passes, plans or times.

    compute layers.0.self_attn.q_proj: mm
    start   all_gather bfloat16 224.0 MiB: layers.0.mlp.gate_proj.weight [recompute]
    wait    all_gather: layers.0.mlp.gate_proj.weight

"[recompute]" and "[save]" are what the reshard pass asks of the partitioner.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from inductor_passes import graph as fxg
from inductor_passes.report import members_of
from simplefsdp.explainer.read import module_of, summary_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

_MIB = 2**20


def graph_lines(graph: fx.Graph) -> tuple[str, ...]:
    """One line per collective start, per wait, and per run of compute up to the next heavy operator."""
    lines: list[str] = []
    region: list[fx.Node] = []

    def close() -> None:
        if any(not fxg.is_view(node) for node in region):
            heavy = [node for node in region if fxg.is_heavy(node)]
            lines.append(f"compute {module_of(heavy or region) or 'model'}: {summary_of(region)}")
        region.clear()

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if fxg.is_start(node) or fxg.is_wait(node):
            close()
            lines.append(_communication(node))
        elif fxg.is_comm(node):
            close()
            lines.append(f"comm    {fxg.operator_name(node)}")
        elif fxg.find_tag(node) is None:
            if fxg.is_heavy(node):
                close()
            region.append(node)
    close()
    return tuple(lines)


def diff_lines(before: Sequence[str], after: Sequence[str], name: str) -> str:
    """The difference as a unified diff; "" when there is none."""
    lines = difflib.unified_diff(before, after, f"{name} before", f"{name} after", lineterm="", n=2)
    return "\n".join(lines)


def _communication(node: fx.Node) -> str:
    start = node.all_input_nodes[0] if fxg.is_wait(node) else node
    if not fxg.is_start(start):
        return "wait    unknown collective"
    members = "+".join(members_of(start))
    if fxg.is_wait(node):
        return f"wait    {fxg.get_kind(start)}: {members}"
    key = fxg.group_key(start)
    policy = str(node.meta.get("recompute", "")).rpartition(".")[2].lower()
    note = {"must_recompute": " [recompute]", "must_save": " [save]"}.get(policy, "")
    operation = f"{key.kind} {key.reduce_op}" if key.reduce_op else key.kind
    return f"start   {operation} {key.dtype} {fxg.full_bytes(start) / _MIB:.2f} MiB: {members}{note}"
