"""What a run leaves behind and shows: metrics files, the picture, the display; the schedule and the clock."""

from __future__ import annotations

import io
import json
import math
import struct
import time
from pathlib import Path

import pytest

from simplefsdp.llama.clock import StepClock
from simplefsdp.llama.display import Eta, Live, Plain, format_duration, sparkline
from simplefsdp.llama.metrics import EvalRecord, History, MetricsLog, TrainRecord, read_history
from simplefsdp.llama.options import TrainOptions
from simplefsdp.llama.plot import plot_loss, smooth
from simplefsdp.llama.reporter import Reporter
from simplefsdp.llama.schedule import DECAYS, WSD_DECAY_FRACTION, Schedule


def _record(step: int, loss: float = 2.0, **changes: object) -> TrainRecord:
    values: dict[str, object] = {
        "step": step,
        "loss": loss,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "tokens": 100 * step,
        "step_time_s": 0.5,
        "tokens_per_s": None if step == 1 else 200.0,
        "mfu": None,
        "peak_memory_bytes": 3 << 20,
    }
    return TrainRecord(**{**values, **changes})  # type: ignore[arg-type]


# -- metrics.jsonl and TensorBoard


def test_records_come_back_as_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write("run", {"options": {"model": "debug"}})
    log.write_train(_record(1))
    log.write_train(_record(2, mfu=0.4))
    log.write_eval(EvalRecord(2, 1.9))
    log.close()
    assert read_history(tmp_path / "metrics.jsonl") == History(
        (_record(1), _record(2, mfu=0.4)), (EvalRecord(2, 1.9),)
    )
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["run", "train", "train", "eval"]


def test_records_are_on_disk_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write_train(_record(1))
    assert read_history(tmp_path / "metrics.jsonl").train == (_record(1),)
    log.close()


def test_resuming_drops_the_steps_that_will_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write("run", {})
    for step in range(1, 6):
        log.write_train(_record(step))
        log.write_eval(EvalRecord(step, 2.0))
    log.close()
    # As a kill in the middle of writing leaves it.
    with path.open("a") as file:
        file.write('{"kind": "train", "st')

    log = MetricsLog(path, start_step=3)
    log.write_train(_record(4, loss=7.0))
    log.close()
    history = read_history(path)
    assert [record.step for record in history.train] == [1, 2, 3, 4]
    assert history.train[-1].loss == 7.0
    assert [record.step for record in history.evals] == [1, 2, 3]
    assert json.loads(path.read_text().splitlines()[0]) == {"kind": "run"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = MetricsLog(tmp_path / "metrics.jsonl", tensorboard_dir=tmp_path / "events")
    assert log.has_tensorboard
    log.write_train(_record(1, loss=3.0))
    log.write_train(_record(2, loss=2.5))
    log.write_eval(EvalRecord(2, 2.75))
    log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 3.0), (2, 2.5)]
    assert [event.step for event in events.Scalars("train/tokens_per_s")] == [2], "not known in step 1"
    assert [(event.step, event.value) for event in events.Scalars("eval/loss")] == [(2, 2.75)]


# -- the picture


def test_the_picture_is_a_png_of_a_readable_size(tmp_path: Path) -> None:
    history = History(
        tuple(_record(step, loss=2 + 3 / step) for step in range(1, 41)),
        (EvalRecord(20, 2.3), EvalRecord(40, 2.2)),
    )
    plot_loss(history, tmp_path / "loss.png", "debug")
    content = (tmp_path / "loss.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 1000
    assert height >= 600
    # A different course is a different picture.
    plot_loss(History(history.train[:20], ()), tmp_path / "other.png", "debug")
    assert (tmp_path / "other.png").read_bytes() != content


def test_a_run_of_one_step_has_a_picture(tmp_path: Path) -> None:
    plot_loss(History((_record(1),), ()), tmp_path / "loss.png", "debug")
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_smoothing_does_not_lag() -> None:
    assert smooth([1.0, 5.0, 2.0], half_width=0) == [1.0, 5.0, 2.0]
    assert smooth([3.0, 0.0, 6.0, 3.0], half_width=1) == [3.0, 3.0, 3.0, 3.0]
    falling = [10.0 - step for step in range(10)]
    assert smooth(falling, half_width=3) == pytest.approx(falling)
    noisy = [step % 2 for step in range(100)]
    assert smooth(noisy, half_width=20)[50] == pytest.approx(0.5, abs=0.05)


# -- the display


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    display = Plain(steps=10, log_every=5)
    display.header("training", {"model": "debug"})
    display.compiling(True)
    for step in range(1, 11):
        display.step(_record(step, loss=3.0), final=step == 10)
    display.evaluation(EvalRecord(10, 2.5))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["training", "  model      debug", "compiling (first step) ..."]
    assert [line[:10] for line in lines[3:]] == ["step  1/10", "step  5/10", "step 10/10", "step 10/10"]
    assert lines[3] == "step  1/10  loss 3.0000  grad norm 1.500  lr 1.00e-03  memory 3 MiB"
    assert "200 tokens/s  memory 3 MiB  eta 0:00" in lines[4]
    assert "eta" not in lines[5]
    assert lines[6] == "step 10/10  held-out loss 2.5000"


def test_the_rate_shown_is_the_mean_since_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    display = Plain(steps=9, log_every=3)
    display.step(_record(1))
    # 100 tokens in 1 s, then in 3 s: 200 tokens in 4 s.
    display.step(_record(2, tokens_per_s=100.0, step_time_s=1.0, mfu=0.2))
    display.step(_record(3, tokens_per_s=100 / 3, step_time_s=3.0, mfu=0.2 / 3))
    last = capsys.readouterr().out.splitlines()[-1]
    assert "  50 tokens/s  " in last
    assert "  MFU 10.0%  " in last


def test_the_live_panel_shows_what_happens() -> None:
    console = pytest.importorskip("rich.console")
    screen = io.StringIO()
    display = Live(10, console=console.Console(file=screen, force_terminal=True, width=100, highlight=False))
    display.header("training", {"model": "debug"})
    display.compiling(True)
    time.sleep(0.3)
    assert "compiling (first step)" in screen.getvalue()
    display.compiling(False)
    for step in range(1, 11):
        display.step(_record(step, loss=11.25 - step, mfu=0.415 if step > 1 else None))
    display.evaluation(EvalRecord(10, 2.5125))
    display.note("written [here]")
    display.close()
    shown = screen.getvalue()
    for text in ("training", "debug", "written [here]", "1.2500", "2.5125", "41.5%", "200", "3 MiB", "▁"):
        assert text in shown, text
    assert "[bold]" not in shown


def test_durations() -> None:
    assert [format_duration(seconds) for seconds in (0.4, 59.6, 3599, 3600, 36061)] == [
        "0:00", "1:00", "59:59", "1:00:00", "10:01:01",
    ]  # fmt: skip


def test_sparkline() -> None:
    assert sparkline([], 8) == ""
    assert sparkline([3.0, 3.0], 8) == "▁▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([7, 7, 0, 0], 2) == "█▁"


def test_eta_follows_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("simplefsdp.llama.display.time.monotonic", lambda: now[0])
    eta = Eta(steps=10)
    assert eta.after(1) is None
    now[0] += 6.0
    assert eta.after(4) == pytest.approx(2.0 * 6)


# -- both at once


def test_reporter_closes_with_the_course_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter(Plain(steps=2, log_every=1), tmp_path)
    reporter.begin({"model": "debug"}, {"options": TrainOptions().to_json()}, start_step=0)
    reporter.train(_record(1, loss=5.5), final=False)
    reporter.compiled(20.0, 21.0, 1.0)
    reporter.train(_record(2, loss=4.5), final=True)
    reporter.evaluation(EvalRecord(2, 4.25))
    reporter.close()
    reporter.conclude("debug", "finished 2 steps")
    out = capsys.readouterr().out
    assert "compiled in 20.0 s (first step 21.0 s, second 1.00 s)\n" in out
    assert "finished 2 steps in 0:00: loss 5.5000 -> 4.5000, held-out 4.2500\n" in out
    assert f"loss curve {tmp_path / 'loss.png'}" in out
    assert (tmp_path / "loss.png").exists()
    assert '"compile_s": 20.0' in (tmp_path / "metrics.jsonl").read_text()


def test_reporter_of_other_ranks_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reporter = Reporter()
    reporter.begin({}, {}, start_step=0)
    reporter.train(_record(1), final=True)
    reporter.close()
    reporter.conclude("debug", "finished")
    assert list(tmp_path.iterdir()) == []


# -- schedule


def test_every_schedule_warms_up_to_the_peak_and_ends_at_the_floor() -> None:
    for decay in DECAYS:
        schedule = Schedule(peak_lr=1.0, steps=100, warmup=10, decay=decay, min_lr_ratio=0.1)
        assert [schedule.lr(step) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
        floor = 1.0 if decay == "constant" else 0.1
        assert schedule.lr(100) == pytest.approx(floor)
        assert schedule.lr(1000) == pytest.approx(floor)
        rates = [schedule.lr(step) for step in range(10, 101)]
        assert rates == sorted(rates, reverse=True)


def test_schedule_values() -> None:
    cosine = Schedule(1.0, 100, 0, "cosine", 0.0)
    assert cosine.lr(25) == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))
    assert cosine.lr(50) == pytest.approx(0.5)
    linear = Schedule(2.0, 100, 20, "linear", 0.5)
    assert linear.lr(60) == pytest.approx(1.5)
    wsd = Schedule(1.0, 100, 0, "wsd", 0.0)
    stable = round(100 * (1 - WSD_DECAY_FRACTION))
    assert [wsd.lr(1), wsd.lr(stable), wsd.lr(stable + 10)] == pytest.approx([1.0, 1.0, 0.5])


def test_schedule_of_warm_up_alone() -> None:
    schedule = Schedule(1.0, steps=4, warmup=4)
    assert [schedule.lr(step) for step in range(1, 5)] == [0.25, 0.5, 0.75, 1.0]


# -- clock


def test_clock_leaves_out_what_is_not_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    waits = []
    monkeypatch.setattr("simplefsdp.llama.clock.time.perf_counter", lambda: now[0])

    def synchronize() -> None:
        waits.append(now[0])
        now[0] += 0.25  # what is still running on the device

    clock = StepClock(synchronize)
    clock.start()
    now[0] += 2.0
    assert clock.lap() == 2.0
    now[0] += 1.0
    with clock.stopped():
        now[0] += 100.0
    now[0] += 3.0
    assert clock.lap() == pytest.approx(1.0 + 0.25 + 3.0)
    assert len(waits) == 3, "at the start and around what is left out; none in a lap"
