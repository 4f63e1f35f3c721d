"""What a person sees of a run: a live panel on a terminal, plain lines anywhere else.

Owns: wording and layout. Must not know: how the numbers come about, files. Only rank 0 has a display that
shows something; the others use `Silent`.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from simplefsdp.llama.metrics import EvalRecord, TrainRecord

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32
REFRESH_PER_S = 4
RATE_WINDOW_STEPS = 20
MIB = 1 << 20


class Display(Protocol):
    """Receives what happens in a run, in the order in which it happens."""

    def header(self, title: str, facts: Mapping[str, str]) -> None:
        """The run in a few lines: what is trained, on what, with which numbers."""

    def note(self, text: str) -> None:
        """One line that stays on the screen."""

    def compiling(self, active: bool) -> None:
        """The first step, in which everything is compiled, begins or has ended."""

    def step(self, record: TrainRecord, *, final: bool = False) -> None:
        """One optimizer step; `final` for the last of the run."""

    def evaluation(self, record: EvalRecord) -> None:
        """One evaluation."""

    def close(self) -> None:
        """The run is over; gives the terminal back."""


class Silent:
    """Shows nothing."""

    def header(self, title: str, facts: Mapping[str, str]) -> None: ...
    def note(self, text: str) -> None: ...
    def compiling(self, active: bool) -> None: ...
    def step(self, record: TrainRecord, *, final: bool = False) -> None: ...
    def evaluation(self, record: EvalRecord) -> None: ...
    def close(self) -> None: ...


class Plain:
    """One line per event, steps thinned out; for files, pipes and terminals without rich.

    Args:
        steps: optimizer steps of the whole run.
        log_every: steps between lines; the first step and the last always have one.
    """

    def __init__(self, steps: int, log_every: int) -> None:
        self._eta = Eta(steps)
        self._rate = MeanRate()
        self._steps = steps
        self._log_every = log_every

    def header(self, title: str, facts: Mapping[str, str]) -> None:
        self.note(title)
        for name, value in facts.items():
            self.note(f"  {name:<10} {value}")

    def note(self, text: str) -> None:
        print(text, flush=True)

    def compiling(self, active: bool) -> None:
        if active:
            self.note("compiling (first step) ...")

    def step(self, record: TrainRecord, *, final: bool = False) -> None:
        eta = self._eta.after(record.step)
        self._rate.add(record)
        if not (record.step == 1 or record.step % self._log_every == 0 or final):
            return
        fields = [
            f"step {record.step:>{len(str(self._steps))}}/{self._steps}",
            f"loss {record.loss:.4f}",
            f"grad norm {record.grad_norm:.3f}",
            f"lr {record.lr:.2e}",
        ]
        if (tokens_per_s := self._rate.tokens_per_s) is not None:
            fields.append(f"{tokens_per_s:,.0f} tokens/s")
        if (mfu := self._rate.mfu) is not None:
            fields.append(f"MFU {mfu:.1%}")
        self._rate = MeanRate()
        fields.append(f"memory {record.peak_memory_bytes / MIB:,.0f} MiB")
        if eta is not None and not final:
            fields.append(f"eta {format_duration(eta)}")
        self.note("  ".join(fields))

    def evaluation(self, record: EvalRecord) -> None:
        self.note(
            f"step {record.step:>{len(str(self._steps))}}/{self._steps}  held-out loss {record.loss:.4f}"
        )

    def close(self) -> None: ...


class Live:
    """A panel that is redrawn in place, above it the lines that stay; needs rich and a terminal.

    Args:
        steps: optimizer steps of the whole run.
        console: a `rich.console.Console`; `None` is standard output.

    Raises:
        ImportError: if rich is not installed.
    """

    def __init__(self, steps: int, console: Any = None) -> None:
        import rich.console
        import rich.live

        self._steps = steps
        self._eta = Eta(steps)
        self._record: TrainRecord | None = None
        self._held_out: float | None = None
        self._remaining_s: float | None = None
        self._compiling_since: float | None = None
        self._rate = MeanRate(window=RATE_WINDOW_STEPS)
        self._losses: deque[float] = deque(maxlen=8 * SPARK_WIDTH)
        self._live = rich.live.Live(
            console=console if console is not None else rich.console.Console(highlight=False),
            refresh_per_second=REFRESH_PER_S,
            get_renderable=self._render,
        )

    def header(self, title: str, facts: Mapping[str, str]) -> None:
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            table.add_row(f"[dim]{name}[/dim]", value)
        self._live.console.print(f"[bold]{title}[/bold]")
        self._live.console.print(table)
        self._live.start()

    def note(self, text: str) -> None:
        from rich.text import Text

        # Not `markup=False`: the panel below is drawn again in the same call, and would lose its own.
        self._live.console.print(Text(text))

    def compiling(self, active: bool) -> None:
        self._compiling_since = time.monotonic() if active else None

    def step(self, record: TrainRecord, *, final: bool = False) -> None:
        self._record = record
        self._losses.append(record.loss)
        self._rate.add(record)
        self._remaining_s = self._eta.after(record.step)

    def evaluation(self, record: EvalRecord) -> None:
        self._held_out = record.loss

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        record = self._record
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column()
        bar.add_column(ratio=1)
        bar.add_column()
        done = record.step if record is not None else 0
        remaining = "" if self._remaining_s is None else f"eta {format_duration(self._remaining_s)}"
        bar.add_row(
            f"step [bold]{done}[/bold]/{self._steps}",
            ProgressBar(total=self._steps, completed=done),
            remaining,
        )
        rows: list[Any] = [bar]
        if self._compiling_since is not None:
            seconds = time.monotonic() - self._compiling_since
            rows.append(f"[yellow]compiling (first step) ... {seconds:.0f} s[/yellow]")
        if record is not None:
            rows.append(_stats(record, self._rate, self._held_out))
            rows.append(f"[cyan]{sparkline(list(self._losses), SPARK_WIDTH)}[/cyan] [dim]loss[/dim]")
        return Panel(Group(*rows), border_style="dim")


def _stats(record: TrainRecord, rate: MeanRate, held_out: float | None) -> Any:
    from rich.table import Table

    cells = {
        "loss": f"{record.loss:.4f}",
        "held-out": "" if held_out is None else f"{held_out:.4f}",
        "grad norm": f"{record.grad_norm:.3f}",
        "lr": f"{record.lr:.2e}",
        "tokens/s": "" if rate.tokens_per_s is None else f"{rate.tokens_per_s:,.0f}",
        "MFU": "" if rate.mfu is None else f"{rate.mfu:.1%}",
        "memory": f"{record.peak_memory_bytes / MIB:,.0f} MiB",
    }
    shown = {name: value for name, value in cells.items() if value}
    table = Table.grid(padding=(0, 3))
    table.add_row(*(f"[dim]{name}[/dim]" for name in shown))
    table.add_row(*(f"[bold]{value}[/bold]" for value in shown.values()))
    return table


class MeanRate:
    """Mean tokens per second, and utilisation, over several steps: single ones jump.

    Args:
        window: steps to average over, counted back from the last; `None` is all.
    """

    def __init__(self, window: int | None = None) -> None:
        self._records: deque[TrainRecord] = deque(maxlen=window)

    def add(self, record: TrainRecord) -> None:
        """Takes a step in, unless its rate is not known."""
        if record.tokens_per_s is not None:
            self._records.append(record)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all steps over their time."""
        return self._mean([record.tokens_per_s for record in self._records])

    @property
    def mfu(self) -> float | None:
        """Utilisation over the same time; `None` where the peak is not known."""
        return self._mean([record.mfu for record in self._records])

    def _mean(self, rates: Sequence[float | None]) -> float | None:
        times = [record.step_time_s for record in self._records]
        known = [(rate, time_s) for rate, time_s in zip(rates, times, strict=True) if rate is not None]
        return sum(rate * time_s for rate, time_s in known) / sum(times) if known else None


class Eta:
    """Estimates the time left from the wall clock since the first step ended, all interruptions included.

    Args:
        steps: optimizer steps of the whole run.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first: tuple[int, float] | None = None

    def after(self, step: int) -> float | None:
        """Returns the seconds left after `step`, or `None` after the first step seen."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
            return None
        first_step, since = self._first
        return (now - since) / (step - first_step) * (self._steps - step)


def make_display(steps: int, log_every: int) -> Display:
    """Returns a live panel if standard output is a terminal and rich is installed, else plain lines."""
    if sys.stdout.isatty():
        try:
            return Live(steps)
        except ImportError:
            pass
    return Plain(steps, log_every)


def format_duration(seconds: float) -> str:
    """Returns "m:ss", from an hour on "h:mm:ss"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: list[float], width: int) -> str:
    """Draws values as one line of blocks, averaged down to at most `width` of them."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)
