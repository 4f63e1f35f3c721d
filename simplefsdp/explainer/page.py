"""Timelines and tables as one HTML page that stands alone: no library, no network.

Owns the page. Must not know graphs or plans. The data is JSON inside the page; `page.js` beside this file draws it on
a canvas, so that a schedule of thousands of spans stays quick to zoom.
"""

from __future__ import annotations

import html
import importlib.resources
import json
from typing import TYPE_CHECKING, Any

from simplefsdp.explainer.draw import ACTIVITY_COLOURS, MEMORY_COLOURS
from simplefsdp.explainer.facts import Memory
from simplefsdp.explainer.table import COLUMNS, leading_cells, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simplefsdp.explainer.schedule import Timeline
    from simplefsdp.explainer.table import BucketRow


def page(
    *,
    title: str,
    verdict: str,
    warnings: Sequence[str],
    caption: str,
    timelines: Sequence[Timeline],
    tables: Sequence[Sequence[BucketRow]],
) -> str:
    """The page as text.

    Args:
        title: heading.
        verdict: the line below it.
        warnings: lines in red.
        caption: the line at the end; says that all is modelled, and with what.
        timelines: one per graph.
        tables: the bucket table of each graph.
    """
    data = {
        "timelines": [_timeline(timeline) for timeline in timelines],
        "colours": {activity.value: colour for activity, colour in ACTIVITY_COLOURS.items()},
        "uses": [{"name": use.value, "colour": MEMORY_COLOURS[use]} for use in Memory],
    }
    # "</" would end the script element inside a name.
    text = json.dumps(data).replace("</", "<\\/")
    script, style = _file("page.js"), _file("page.css")
    notes = "".join(f"<p class=warning>{html.escape(line)}</p>" for line in warnings)
    sections = "".join(
        f"<h2>{html.escape(timeline.kind)}: buckets</h2>{_table(rows)}"
        for timeline, rows in zip(timelines, tables, strict=True)
    )
    title = html.escape(title)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{style}</style>"
        f"<h1>{title}</h1><p>{html.escape(verdict)}</p>{notes}"
        "<p class=hint>Scroll to zoom, drag to move, double-click to see all; point at a span to read it.</p>"
        "<div id=legend></div><div id=charts></div>"
        f"{sections}<p class=hint>{html.escape(caption)}</p>"
        f"<script>const DATA = {text};\n{script}</script></html>"
    )


def _file(name: str) -> str:
    return importlib.resources.files("simplefsdp.explainer").joinpath(name).read_text("utf-8")


def _timeline(timeline: Timeline) -> dict[str, Any]:
    rows = {row: number for number, row in enumerate(timeline.rows)}
    return {
        "kind": timeline.kind,
        "step": timeline.step_ns,
        "exposed": timeline.exposed_ns,
        "rows": list(rows),
        "spans": [
            [rows[span.row], span.activity.value, span.name, span.begin_ns, span.end_ns, span.bucket]
            for span in timeline.spans
        ],
        "memory": [[point.time_ns, *point.by_use] for point in timeline.memory],
    }


def _table(rows: Sequence[BucketRow]) -> str:
    head = "".join(f"<th>{html.escape(column)}" for column in COLUMNS)
    body = ""
    for row in rows:
        members = f'<td title="{html.escape(" ".join(row.members))}">{html.escape(shorten(row.members))}'
        flag = " class=exposed" if row.exposed_ns else ""
        body += f"<tr{flag}>" + "".join(f"<td>{html.escape(cell)}" for cell in leading_cells(row)) + members
        body += f"<td>{html.escape(row.reason)}"
    return f"<table><tr>{head}{body}</table>"
