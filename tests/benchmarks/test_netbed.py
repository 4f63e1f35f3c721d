"""The bed that benchmarks run ranks on."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.netbed import RankFailure, burst_bytes, open_bed, why_not

SHOW_RANK = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_loopback_runs_every_rank_and_gives_what_rank_0_prints():
    with open_bed(3, None) as bed:
        assert bed.run([sys.executable, "-c", SHOW_RANK], 60) == "rank 0 of 3\n"


def test_a_rank_that_fails_ends_the_others():
    code = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(100)"
    with open_bed(2, None) as bed, pytest.raises(RankFailure, match="rank 1 ended with exit code 7"):
        bed.run([sys.executable, "-c", code], 60)


def test_ranks_are_ended_when_the_time_is_up():
    with open_bed(2, None) as bed, pytest.raises(RankFailure, match="2 of 2 ranks still ran after 0 s"):
        bed.run([sys.executable, "-c", "import time; time.sleep(100)"], 0.2)


@pytest.mark.skipif(why_not() is not None, reason="network namespaces cannot be made here")
def test_a_network_has_its_rate_and_leaves_nothing_behind():
    name = f"sfsdp{os.getpid()}-"
    with open_bed(2, "100mbit") as bed:
        assert namespaces().count(name) == 3
        shaped = subprocess.run(
            ["tc", "-n", f"{name}0", "qdisc", "show", "dev", "net0"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "rate 100Mbit" in shaped.stdout
        assert "100mbit" in bed.description
        assert bed.run([sys.executable, "-c", SHOW_RANK], 60) == "rank 0 of 2\n"
    assert name not in namespaces()
    with pytest.raises(KeyboardInterrupt), open_bed(2, "100mbit"):
        raise KeyboardInterrupt
    assert name not in namespaces()


def test_a_link_saves_up_little_while_it_is_idle():
    assert burst_bytes("70mbit") == 18_000
    assert burst_bytes("10gbit") == 625_000
    with pytest.raises(ValueError, match="such as 500mbit; got '1gbps'"), open_bed(2, "1gbps"):
        pass


def test_without_a_network_the_reason_is_printed(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.netbed.why_not", lambda: "network namespaces need root")
    with open_bed(2, "1gbit") as bed:
        assert bed.description == "loopback, no rate limit"
    assert "network namespaces need root; using loopback" in capsys.readouterr().out


PARENT = """
import sys
import time
from benchmarks.netbed import open_bed
rank = "import os, time; print(os.getpid(), file=open(f'{sys.argv[1]}/{os.environ[\\"RANK\\"]}', 'w')); time.sleep(100)"
with open_bed(2, None) as bed:
    bed.run([sys.executable, "-c", "import sys; " + rank, sys.argv[1]], 60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ranks end with their parent on Linux")
def test_ranks_end_with_a_benchmark_that_is_killed(tmp_path):
    def gone(pid: int) -> bool:
        try:  # a process that has ended stays listed where nobody waits for it
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    def wait_for(condition) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    files = [tmp_path / "0", tmp_path / "1"]
    wait_for(lambda: all(file.exists() and file.read_text().strip() for file in files))
    ranks = [int(file.read_text()) for file in files]
    assert not any(map(gone, ranks))
    parent.kill()
    parent.wait()
    wait_for(lambda: all(map(gone, ranks)))


@pytest.mark.skipif(why_not() is not None, reason="network namespaces cannot be made here")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_namespaces_are_made_leaves_none(monkeypatch, number):
    name = f"sfsdp{os.getpid()}-"
    monkeypatch.setattr("benchmarks.netbed._limit", lambda *arguments: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit), open_bed(2, "100mbit"):
        pass
    assert name not in namespaces()
