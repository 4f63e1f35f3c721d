"""What `simplefsdp.explain` returns: a report that prints, draws and saves itself.

Owns the layout of the text and of the output directory. Must not know graphs: it is plain data, fit for a notebook.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections import Counter
from pathlib import Path

from simplefsdp.explainer.capture import GRAPH_BREAK, Dump, Interruption
from simplefsdp.explainer.facts import GraphFacts, Memory
from simplefsdp.explainer.lines import diff_lines
from simplefsdp.explainer.runs import Run
from simplefsdp.explainer.schedule import Timeline, make_timeline
from simplefsdp.explainer.table import BucketRow, bucket_rows, table_text
from simplefsdp.explainer.verdict import GIB, Verdict, make_verdict

SCHEDULE_PNG, SCHEDULE_HTML, TRACE_JSON, REPORT_TEXT = (
    "schedule.png",
    "schedule.html",
    "trace.json",
    "report.txt",
)


_DUMP = re.compile(r"(joint|forward|backward|inference)\d*\.(reshard|bucket)\.(before\.txt|after\.txt|diff)")


@dataclasses.dataclass(frozen=True)
class Report:
    """What the passes did with a model, and what the model of the hardware says it costs.

    Args:
        title: what was explained: the model, the ranks.
        profile: name of the hardware profile that all times are modelled with.
        graphs: forward, backward; several pairs after graph breaks.
        runs: which graph runs when in a step; a graph that equal modules share runs several times.
        dumps: each graph before and after each pass.
        interruptions: graph breaks and recompiles.
        eager: forward and backward as eager mode would run them, if that was asked for and can be read.
    """

    title: str
    profile: str
    graphs: tuple[GraphFacts, ...]
    dumps: tuple[Dump, ...]
    interruptions: tuple[Interruption, ...]
    runs: tuple[Run, ...]
    eager: tuple[GraphFacts, ...] = ()

    @functools.cached_property
    def timelines(self) -> tuple[Timeline, ...]:
        """The modelled schedule of each graph."""
        return tuple(make_timeline(facts) for facts in self.graphs)

    @functools.cached_property
    def tables(self) -> tuple[tuple[BucketRow, ...], ...]:
        """The bucket table of each graph."""
        return tuple(map(bucket_rows, self.graphs, self.timelines))

    @functools.cached_property
    def verdict(self) -> Verdict:
        """Step time, lower bound, exposed share, peak memory, what to change."""
        return make_verdict(self.graphs, self.timelines, self.runs, self.profile)

    @property
    def caption(self) -> str:
        """The line that every output carries."""
        return f"{self.title}; all times and bytes modelled, hardware profile {self.profile}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line for every graph break and recompile, with its place."""
        return tuple(
            f"{item.kind} at {item.place}: {item.reason}"
            + ("; collectives do not overlap across it" if item.kind == GRAPH_BREAK else "")
            for item in self.interruptions
        )

    def __str__(self) -> str:
        parts = [self.caption, str(self.verdict), *self.warnings]
        times = Counter(run.graph for run in self.runs)
        for number, (facts, timeline, rows) in enumerate(
            zip(self.graphs, self.timelines, self.tables, strict=True)
        ):
            peak = timeline.peak
            uses = ", ".join(
                f"{use.value} {size / GIB:.3f}" for use, size in zip(Memory, peak.by_use, strict=True) if size
            )
            bound = facts.plan.lower_bound
            often = f", {times[number]} times a step" if times[number] != 1 else ""
            took = f"modelled {timeline.step_ns / 1e6:.3f} ms, {timeline.exposed_ns / 1e6:.3f} ms exposed"
            limit = f"lower bound {bound.time_ns / 1e6:.3f} ms ({bound.limit})"
            count = f"{len(facts.problem.collectives)} collectives in {len(rows)} buckets, planner {facts.plan.planner}"
            most = (
                f"peak {peak.total_bytes / GIB:.3f} GiB at {peak.time_ns / 1e6:.3f} ms: {uses or 'nothing'}"
            )
            parts += ["", f"{facts.kind}{often}: {took}, {limit}; {count}", most]
            if facts.failure:
                parts.append(f"the passes left this graph alone: {facts.failure}")
            parts += [facts.motion] if facts.motion else []
            parts += [table_text(rows)] if rows else []
        return "\n".join(parts)

    def diff(self, graph: str) -> str:
        """What the passes changed in a graph, as a unified diff of normalised lines.

        Args:
            graph: "joint", "forward", "backward" or "inference".
        """
        found = [dump for dump in self.dumps if dump.graph == graph]
        return "\n".join(
            text for dump in found if (text := diff_lines(dump.before, dump.after, f"{graph} {dump.name}"))
        )

    def to_html(self) -> str:
        """A page that stands alone, with the timelines to zoom and the tables."""
        from simplefsdp.explainer.page import page

        return page(
            title=self.title,
            verdict=str(self.verdict),
            warnings=self.warnings,
            caption=self.caption,
            timelines=self.timelines,
            tables=self.tables,
        )

    def trace(self) -> dict[str, object]:
        """The timelines in the trace event format that Perfetto and chrome://tracing open."""
        from simplefsdp.explainer.trace_events import trace_events

        return trace_events(self.timelines, self.runs, self.caption)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the timelines as a picture.

        Args:
            path: file to write; its ending names the format.

        Raises:
            ImportError: matplotlib is not there; names what to install.
        """
        from simplefsdp.explainer.draw import draw

        draw(self.timelines, self.caption, Path(path))

    def save(self, directory: str | os.PathLike[str], *, picture: bool = True) -> tuple[Path, ...]:
        """Write everything into a directory.

        Args:
            directory: created if it is not there. Files of an earlier report are replaced, and its dumps taken away.
            picture: also draw the PNG, which needs matplotlib.

        Returns:
            The files: text, page, trace, each graph before and after each pass and as a diff, and the picture.
        """
        import json

        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        texts = {
            REPORT_TEXT: f"{self}\n",
            SCHEDULE_HTML: self.to_html(),
            TRACE_JSON: json.dumps(self.trace()),
        }
        for dump in self.dumps:
            name = f"{dump.graph}{dump.number or ''}.{dump.name}"
            texts[f"{name}.before.txt"] = "\n".join([*dump.before, ""])
            texts[f"{name}.after.txt"] = "\n".join([*dump.after, ""])
            texts[f"{name}.diff"] = diff_lines(dump.before, dump.after, f"{dump.graph} {dump.name}") + "\n"
        for path in folder.iterdir():  # dumps of an earlier report with more graphs
            if _DUMP.fullmatch(path.name) and path.name not in texts:
                path.unlink()
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
        files = [folder / file for file in texts]
        if picture:
            self.plot(folder / SCHEDULE_PNG)
            files.append(folder / SCHEDULE_PNG)
        return tuple(files)
