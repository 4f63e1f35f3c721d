"""The bed that benchmarks run ranks on."""

from __future__ import annotations

import os
import subprocess
import sys

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
