"""The bucket table: what travels together, where it starts and is waited for, what it costs, and why.

Owns rows and their text. Must not know graphs; times come from a timeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inductor_passes.plan import Plan
from inductor_passes.timeline import ExposureReason
from simplefsdp.explainer.facts import GraphFacts
from simplefsdp.explainer.schedule import Timeline, bucket_name

MIB = 2**20

COLUMNS = (
    "#",
    "kind",
    "group",
    "dtype",
    "MiB",
    "ms",
    "exposed ms",
    "issued",
    "awaited",
    "members",
    "reason",
)


@dataclasses.dataclass(frozen=True)
class BucketRow:
    """One bucket.

    Args:
        number: position in the order of starts.
        members: parameters it carries.
        kind: "all_gather", "reduce_scatter", ..., with the reduction.
        group: label of the process group.
        dtype: element type on the wire.
        size_bytes: bytes of the unsharded side.
        issued: where it starts, in words.
        awaited: where it is waited for, in words.
        modelled_ns: modelled time on its process group.
        exposed_ns: modelled time for which it blocks compute.
        why_exposed: the reason, "" when it is hidden.
        why_alone: why it has one member only, "" when it has several.
    """

    number: int
    members: tuple[str, ...]
    kind: str
    group: str
    dtype: str
    size_bytes: int
    issued: str
    awaited: str
    modelled_ns: int
    exposed_ns: int
    why_exposed: str
    why_alone: str

    @property
    def reason(self) -> str:
        """Why it is exposed and why it is alone, in one clause."""
        alone = f"alone: {self.why_alone}" if self.why_alone else ""
        return "; ".join(part for part in (self.why_exposed, alone) if part)


def bucket_rows(facts: GraphFacts, timeline: Timeline, plan: Plan | None = None) -> tuple[BucketRow, ...]:
    """The table of one graph, in the order in which buckets start.

    Args:
        facts: the graph.
        timeline: its schedule under the plan.
        plan: None takes the one the passes made.
    """
    plan = facts.plan if plan is None else plan
    alone = dict(plan.alone)
    rows = []
    for number, bucket in enumerate(plan.buckets):
        items = [facts.problem.collectives[member] for member in bucket.members]
        time = timeline.buckets[number]
        why = "" if time.reason is ExposureReason.HIDDEN else time.reason.value
        if time.blocker is not None:
            why = f"queued behind {bucket_name(facts, plan, time.blocker)}"
        key = items[0].key
        reason = alone.get(bucket.members[0]) if len(items) == 1 else None
        rows.append(
            BucketRow(
                number,
                tuple(item.name for item in items),
                f"{key.kind} {key.reduce_op}".strip(),
                key.group,
                key.dtype,
                sum(item.size_bytes for item in items),
                facts.slot_name(bucket.issue_slot),
                facts.slot_name(bucket.wait_slot),
                time.end_ns - time.begin_ns,
                time.exposed_ns,
                why,
                "" if reason is None else reason.value,
            )
        )
    return tuple(rows)


def shorten(members: Sequence[str]) -> str:
    """Member names with what they share written once: "layers.0: wq.weight, wk.weight, 7 more"."""
    if len(members) == 1:
        return members[0]
    split = [name.split(".") for name in members]
    shared = 0
    while all(len(name) > shared + 1 and name[shared] == split[0][shared] for name in split):
        shared += 1
    rest = [".".join(name[shared:]) for name in split]
    shown = ", ".join(rest[:2]) + (f", {len(rest) - 2} more" if len(rest) > 2 else "")
    return f"{'.'.join(split[0][:shared])}: {shown}" if shared else shown


def leading_cells(row: BucketRow) -> tuple[str, ...]:
    """What stands in the columns before the members."""
    return (
        str(row.number),
        row.kind,
        row.group,
        row.dtype,
        f"{row.size_bytes / MIB:.2f}",
        f"{row.modelled_ns / 1e6:.3f}",
        f"{row.exposed_ns / 1e6:.3f}",
        row.issued,
        row.awaited,
    )


def table_text(rows: Sequence[BucketRow]) -> str:
    """The table in plain text, with aligned columns."""
    lines = [(*leading_cells(row), shorten(row.members), row.reason) for row in rows]
    widths = [max(len(line[column]) for line in (COLUMNS, *lines)) for column in range(len(COLUMNS))]
    numeric = (0, 4, 5, 6)

    def line(values: Sequence[str]) -> str:
        parts = [
            value.rjust(width) if column in numeric else value.ljust(width)
            for column, (value, width) in enumerate(zip(values, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([line(COLUMNS), *map(line, lines)])
