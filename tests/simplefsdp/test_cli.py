"""The command line: what is refused and how, the launcher's processes, and a few runs as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from simplefsdp import cli
from simplefsdp.llama import launch
from simplefsdp.llama.options import DEBUG_RECIPE, LARGE_RECIPE, TrainOptions, UsageError, parse
from simplefsdp.llama.rundir import METRICS_FILE, create_run_directory, find_run_directory

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 120


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# -- options


BAD_INPUT = {
    "unknown option": (["--stepz", "3"], "did you mean --steps"),
    "stray word": (["fast"], "unrecognized options: fast"),
    "not a number": (["--steps", "many"], "--steps"),
    "missing value": (["--steps"], "--steps"),
    "one of two values": (["--betas", "0.9"], "--betas"),
    "unknown choice": (["--precision", "fp8"], "'auto', 'fp32', 'bf16'"),
    "unknown config": (["--model", "2b"], "available: debug, 1b, 8b"),
    "too long for the model": (["--seq-len", "4096"], "at most 1024 tokens"),
    "no steps": (["--steps", "0"], "--steps 0: must be at least 1"),
    "negative rate": (["--lr", "-1"], "--lr -1.0: must be a positive number"),
    "rate that is none": (["--lr", "nan"], "--lr nan: must be a positive number"),
    "beta of one": (["--betas", "0.9", "1"], "--betas"),
    "warm-up longer than the run": (["--steps", "5", "--warmup", "6"], "between 0 and the 5 steps"),
    "no held-out text": (["--val-fraction", "0"], "--val-fraction 0.0: must be between 0 and 1"),
    "missing data": (["--data", "nowhere.txt"], "nowhere.txt: no such file"),
    "glob without a match": (["--data", "*.jsonl"], "no file matches"),
    "missing tokenizer": (["--tokenizer", "nowhere.json"], "--tokenizer nowhere.json: no such file"),
    "no Hugging Face model": (["--hf", "."], "no config.json"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_that_names_it(name: str) -> None:
    argv, expected = BAD_INPUT[name]
    with pytest.raises(UsageError) as caught:
        parse(argv, prog="simplefsdp train")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not set("│─╭╰") & set(str(caught.value))


def test_recipe_is_the_models_with_what_was_given() -> None:
    assert parse([], prog="x").recipe == DEBUG_RECIPE
    assert parse(["--model", "8b"], prog="x").recipe == LARGE_RECIPE
    recipe = parse(["--steps", "50", "--lr", "1e-4"], prog="x").recipe
    assert (recipe.steps, recipe.lr, recipe.seq_len) == (50, 1e-4, DEBUG_RECIPE.seq_len)
    assert recipe.warmup == 5, "the default warm-up is at most a tenth of the run"
    assert parse(["--steps", "50", "--warmup", "20"], prog="x").recipe.warmup == 20


def test_options_become_json() -> None:
    options = TrainOptions(out=Path("here"), data=("a", "b"))
    assert json.loads(json.dumps(options.to_json()))["out"] == "here"


# -- the run's directory


def test_a_new_run_never_takes_an_earlier_ones_directory() -> None:
    assert find_run_directory(TrainOptions()) == Path("runs/debug")
    for expected in ("runs/debug", "runs/debug-2", "runs/debug-3"):
        directory = create_run_directory(TrainOptions())
        assert directory == Path(expected)
        (directory / METRICS_FILE).touch()
    assert find_run_directory(TrainOptions(resume=True)) == Path("runs/debug-3")
    assert find_run_directory(TrainOptions(model="8b", resume=True)) == Path("runs/8b")


def test_a_run_that_failed_before_it_began_leaves_its_name_free() -> None:
    assert create_run_directory(TrainOptions()) == create_run_directory(TrainOptions())


def test_out_that_holds_a_run_needs_resume(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).touch()
    with pytest.raises(UsageError, match="--resume"):
        find_run_directory(TrainOptions(out=tmp_path))
    assert find_run_directory(TrainOptions(out=tmp_path, resume=True)) == tmp_path


@pytest.mark.parametrize(
    ("option", "make"),
    [
        ("--out", lambda path: TrainOptions(out=path)),
        ("--export-hf", lambda path: TrainOptions(export_hf=path)),
        ("--checkpoint-dir", lambda path: TrainOptions(checkpoint_dir=path)),
    ],
)
def test_a_file_in_the_way_is_named(tmp_path: Path, option: str, make: object) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"{option} .*file is not a directory"):
        find_run_directory(make(tmp_path / "file" / "below"))  # type: ignore[operator]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a directory nobody can write to")
def test_an_unwritable_directory_is_named() -> None:
    # Root may write anywhere as far as permissions go; /proc refuses even root.
    with pytest.raises(UsageError, match=r"--out /proc/self/here: .*cannot be written"):
        create_run_directory(TrainOptions(out=Path("/proc/self/here")))


# -- the world


def test_sharding_factor_must_divide_the_ranks() -> None:
    with pytest.raises(UsageError, match="must divide the 4 ranks, so one of 1, 2, 4"):
        launch.find_world_size(TrainOptions(device="cpu", nproc=4, sharding_factor=3))
    assert launch.find_world_size(TrainOptions(device="cpu", nproc=4, sharding_factor=2)) == 4
    assert launch.find_world_size(TrainOptions(device="cpu")) == launch.DEFAULT_CPU_RANKS


def test_a_missing_compiler_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match=r"no-such-compiler: install it, or use --no-compile"):
        launch.launch([], TrainOptions(device="cpu"))
    monkeypatch.delenv("CXX")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/no/such/headers")
    with pytest.raises(UsageError, match=r"/no/such/headers/Python.h: install them .*, or use --no-compile"):
        launch.launch([], TrainOptions(device="cpu"))
    launch.check_cpp_compiler(TrainOptions(device="cpu", compile=False))
    launch.check_cpp_compiler(TrainOptions(device="cpu", compile_backend="aot_eager"))


# -- the launcher, with ranks that are a line of Python


def _launch(script: str, world_size: int = 2, **arguments: object) -> subprocess.Popen[str]:
    """Starts a launcher in a process of its own, so that signals can be sent to it and its output be seen."""
    program = (
        "import sys; from simplefsdp.llama.launch import RankProcesses\n"
        f"with RankProcesses([sys.executable, '-c', {script!r}], {world_size}, cpu=True, **{arguments!r}) as ranks:\n"
        "    sys.exit(ranks.wait())"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )


def test_ranks_know_their_place_and_rank_0_speaks() -> None:
    script = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['OMP_NUM_THREADS'])"
    process = _launch(script, world_size=3)
    out, err = process.communicate(timeout=RUN_TIMEOUT_S)
    assert (process.returncode, out, err) == (0, "0 3 1\n", "")


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ("import os, sys; sys.exit(2)", 2, ""),
        ("import os, sys; sys.exit('lost' if os.environ['RANK'] == '1' else 0)", 1, "[rank 1] lost\n"),
        (
            "import os; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9)",
            137,
            "rank 1 was killed by SIGKILL",
        ),
    ],
)
def test_exit_code_and_the_failed_ranks_last_words(script: str, code: int, message: str) -> None:
    process = _launch(script)
    out, err = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == code
    assert message in err
    assert out == ""


def test_ranks_that_hang_after_a_failure_are_killed() -> None:
    script = "import os, sys, time; sys.exit(1) if os.environ['RANK'] == '0' else time.sleep(600)"
    process = _launch(script, failure_grace_s=0.5)
    _, err = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 1
    assert "rank 0 failed; killing rank 1" in err


SAVING_RANK = """
import os, signal, sys, time
def save(number, frame):
    print('saved', signal.Signals(number).name, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save); signal.signal(signal.SIGINT, save)
if {watch}:
    from simplefsdp.llama.launch import watch_launcher
    watch_launcher()
print('ready', os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_ranks(number: signal.Signals) -> None:
    # With one rank: another one may still be starting when rank 0 is ready.
    process = _launch(SAVING_RANK.format(watch=False), world_size=1)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready")
    process.send_signal(number)
    out, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert out == f"saved {number.name}\n"
    assert process.returncode == 0


def test_ranks_stop_when_their_launcher_is_killed() -> None:
    process = _launch(SAVING_RANK.format(watch=True), world_size=1)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready")
    process.kill()
    out, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert out == "saved SIGTERM\n"


# -- the command


def _run(*argv: str, module: str = "simplefsdp.cli", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *argv],
        env=_environment(**environment),
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )


def _environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **extra}


def test_help_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    assert cli.main([]) == 2
    assert "train" in capsys.readouterr().err
    assert cli.main(["fly"]) == 2
    assert capsys.readouterr().err == "simplefsdp: unknown command 'fly'; use one of train, plan, explain\n"


def test_a_mistyped_option_is_one_line_and_exit_code_2() -> None:
    result = _run("train", "--stepz", "3")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "simplefsdp train: error: unrecognized options: --stepz, 3; did you mean --steps? "
        "(see simplefsdp train --help)\n"
    )


def test_the_launcher_does_without_torch() -> None:
    program = "import sys, simplefsdp.cli, simplefsdp.llama.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=_environment()).returncode == 0


TINY = (
    "--no-compile", "--seq-len", "16", "--local-batch", "2", "--eval-every", "0", "--log-every", "1",
    "--no-tensorboard", "--device", "cpu",
)  # fmt: skip


def test_what_only_the_ranks_can_see_is_also_one_line(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    result = _run("train", *TINY, "--data", "short.txt")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("simplefsdp train: error: train data")
    assert "Traceback" not in result.stdout + result.stderr


def test_a_reader_that_goes_away_ends_the_command_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "simplefsdp.cli", "--help"],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def _first_lines(process: subprocess.Popen[str], until: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(until):
            return lines
    raise AssertionError(f"no line starts with {until!r}: {lines}")


def _start(argv: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "simplefsdp.cli", "train", *argv],
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_sigterm_saves_and_resume_goes_on() -> None:
    process = _start([*TINY, "--steps", "100000", "--checkpoint-every", "100000"])
    _first_lines(process, "step      2/100000")
    process.terminate()
    out, err = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 0, err
    saved = int(out.partition("asked to stop: saved step ")[2].split()[0])
    assert (Path("runs/debug/checkpoints") / f"step-{saved:09}").is_dir()

    result = _run("train", *TINY, "--resume", "--steps", str(saved + 2))
    assert result.returncode == 0, result.stderr
    assert f"resumed after step {saved}\n" in result.stdout
    assert f"finished {saved + 2} steps" in result.stdout
    records = [json.loads(line) for line in Path("runs/debug", METRICS_FILE).read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, saved + 3))
    assert Path("runs/debug/loss.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_killed_rank_ends_the_run_and_is_named() -> None:
    process = _start([*TINY, "--steps", "100000", "--checkpoint-every", "0"])
    _first_lines(process, "step      2/100000")
    killed = _child_with_rank(process.pid, "1")
    began = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    _, err = process.communicate(timeout=RUN_TIMEOUT_S)
    assert time.monotonic() - began < 60
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in err
    assert "[rank 0] rank 1 (host" in err


def _child_with_rank(parent: int, rank: str) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in children:
        if f"\0RANK={rank}\0" in "\0" + Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise AssertionError(f"no rank {rank} among {children}")


def test_torchrun_starts_it_too() -> None:
    result = _run(
        "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", "0", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "127.0.0.1:0", "-m", "simplefsdp.llama.train", *TINY, "--steps", "1",
        module="torch.distributed.run",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "finished 1 steps" in result.stdout
