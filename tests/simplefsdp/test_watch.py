"""Ranks that die, fail, fall silent or are asked to stop, and what the others do about it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from simplefsdp.llama.peer_link import Address, Listener, connect
from simplefsdp.llama.watch import EXIT_PEER_LOST, GracefulShutdown, RankWatch
from tests.helpers.mortal import TIMEOUT_S, MortalRanks

SILENCE_S = 2.0
# Far longer than any of these tests: what ends a rank earlier was not silence.
NEVER_S = 600.0
# Ranks that a death ends are gone before this; a process that outlives its parent by this has been a burden.
CHILD_S = 20.0


def watch(timeout_s: float = NEVER_S) -> RankWatch:
    return RankWatch(interval_s=0.2, timeout_s=timeout_s, settle_s=0.5)


def account(ranks: MortalRanks, rank: int) -> str:
    """How other ranks describe a rank, up to the step."""
    return f"rank {rank} (host {socket.gethostname()}, pid {ranks.pids[rank]}, last reported step "


def assert_others_name(ranks: MortalRanks, culprit: int, what: str, codes: list[int | None]) -> None:
    for rank, code in enumerate(codes):
        if rank != culprit:
            log = ranks.log(rank)
            named = re.search(
                rf"^\[rank {rank}\] {re.escape(account(ranks, culprit))}(\d+)\) {what}", log, re.M
            )
            assert named, log
            assert int(named[1]) >= 1, log
            # 1 where it was in a collective with a rank that had already ended because of the culprit.
            assert code in (EXIT_PEER_LOST, 1), log


def never_end(rank: int, world_size: int) -> None:
    """Ranks 0 and 2 wait for each other inside gloo for ever; rank 1 has a child that outlives it."""
    with watch() as it:
        it.step = 1
        if rank == 1 and os.fork() == 0:
            time.sleep(CHILD_S)
            os._exit(0)
        time.sleep(0.5)
        print("ready", flush=True)
        if rank == 1:
            time.sleep(NEVER_S)
        dist.recv(torch.empty(1), src=2 - rank)


@pytest.mark.parametrize("culprit", [0, 1])
def test_killed_rank_is_named_by_ranks_stuck_in_a_collective(tmp_path: Path, culprit: int) -> None:
    ranks = MortalRanks(never_end, 3, tmp_path / "ranks")
    ranks.wait_for_line("ready")
    os.kill(ranks.pids[culprit], signal.SIGKILL)
    killed_at = time.monotonic()
    codes = ranks.wait()
    assert time.monotonic() - killed_at < CHILD_S / 2
    assert codes[culprit] == -signal.SIGKILL
    assert_others_name(ranks, culprit, "died without a word", codes)


def raise_on(rank: int, world_size: int, culprit: int) -> None:
    with watch() as it:
        for it.step in range(1, 1000):
            if rank == culprit and it.step == 7:
                raise ValueError("broken data\nsecond line")
            dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("culprit", [0, 1])
def test_exception_is_told_to_the_other_ranks(tmp_path: Path, culprit: int) -> None:
    ranks = MortalRanks(raise_on, 3, tmp_path / "ranks", culprit)
    codes = ranks.wait()
    assert codes[culprit] == 1
    assert "ValueError: broken data" in ranks.log(culprit)
    for rank in {0, 1, 2} - {culprit}:
        assert codes[rank] in (EXIT_PEER_LOST, 1)  # 1 where its own collective failed first
        lines = [line for line in ranks.log(rank).splitlines() if line.startswith(f"[rank {rank}] ")]
        assert lines[0] == f"[rank {rank}] {account(ranks, culprit)}7) failed: ValueError: broken data"


def raise_everywhere(rank: int, world_size: int) -> None:
    with watch():
        raise ValueError("nobody can do this")


def test_error_on_all_ranks_is_left_to_them(tmp_path: Path) -> None:
    ranks = MortalRanks(raise_everywhere, 3, tmp_path / "ranks")
    assert ranks.wait() == [1, 1, 1]
    for rank in range(3):
        assert "ValueError: nobody can do this" in ranks.log(rank)
        assert "[rank" not in ranks.log(rank)


def run_for_long(rank: int, world_size: int) -> None:
    with watch(SILENCE_S) as it:
        it.step = 1
        time.sleep(0.5)
        print("ready", flush=True)
        time.sleep(NEVER_S)


def test_stopped_rank_is_lost_and_ends_once_it_continues(tmp_path: Path) -> None:
    ranks = MortalRanks(run_for_long, 3, tmp_path / "ranks")
    ranks.wait_for_line("ready")
    os.kill(ranks.pids[1], signal.SIGSTOP)
    ranks.wait_for_line("[rank 0] ending at step 1", [0])
    ranks.wait_for_line("[rank 2] ending at step 1", [2])
    os.kill(ranks.pids[1], signal.SIGCONT)
    codes = ranks.wait()
    assert codes[0] == codes[2] == EXIT_PEER_LOST
    assert_others_name(ranks, 1, r"has given no sign of life for \d s", codes)
    assert codes[1] == EXIT_PEER_LOST
    assert f"[rank 1] {account(ranks, 1)}1) has given no sign" in ranks.log(1)


def leave_one_by_one(rank: int, world_size: int) -> None:
    with watch(SILENCE_S):
        print("ready", flush=True)
        time.sleep(SILENCE_S + {0: 0.0, 1: 1.0, 2: 2.0}[rank])
    if rank == 1:
        sys.exit(5)  # after its goodbye this is nobody's business


def test_goodbyes_and_a_pause_of_all_ranks_end_nobody(tmp_path: Path) -> None:
    ranks = MortalRanks(leave_one_by_one, 3, tmp_path / "ranks")
    ranks.wait_for_line("ready")
    for pid in ranks.pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.2 * SILENCE_S)
    for pid in reversed(ranks.pids):
        os.kill(pid, signal.SIGCONT)
    assert ranks.wait() == [0, 5, 0]
    assert [ranks.log(rank) for rank in range(3)] == ["ready\n"] * 3


def train_under_agent() -> None:
    dist.init_process_group("gloo")
    with GracefulShutdown(), RankWatch() as it:
        for it.step in range(1, 1000):
            if dist.get_rank() == 1 and it.step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))


def run_elastic_agent(log: Path) -> None:
    """What torchrun does in its process, with workers that are forked from it."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
    )
    elastic_launch(config, train_under_agent)()


def test_death_is_named_under_the_agent_of_torchrun(tmp_path: Path) -> None:
    log = tmp_path / "log"
    agent = get_context("forkserver").Process(target=run_elastic_agent, args=(log,))
    agent.start()
    agent.join(TIMEOUT_S)
    ended = not agent.is_alive()
    agent.kill()
    agent.join()
    text = log.read_text()
    assert ended, text
    assert agent.exitcode != 0
    named = r"^\[rank 0\] rank 1 \(host \S+, pid \d+, last reported step \d+\) died without a word"
    assert re.search(named, text, re.M), text


def test_watch_of_one_rank_and_bad_times(tmp_path: Path) -> None:
    ranks = MortalRanks(raise_everywhere, 1, tmp_path / "ranks")
    assert ranks.wait() == [1]
    with pytest.raises(RuntimeError, match="init_process_group"), RankWatch():
        pass
    with pytest.raises(ValueError, match="timeout_s must be at least twice interval_s: got 3 and 2"):
        RankWatch(interval_s=2.0, timeout_s=3.0)


def test_strangers_on_the_port_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    listener = Listener()
    stranger = socket.create_connection(("127.0.0.1", listener.address.port))
    stranger.sendall(b'{"rank": 1, "token": "guess"}\n')
    links: list[Any] = []
    hello = {"rank": 1, "host": "here", "pid": 7}
    thread = threading.Thread(target=lambda: links.append(connect(listener.address, hello, 20.0)))
    thread.start()
    ((link, received),) = listener.accept([1], 20.0)
    thread.join()
    assert received == {**hello, "token": listener.address.token}
    assert stranger.recv(1) == b""
    for end in (link, *links, stranger):
        end.close()


def test_missing_ranks_and_unreachable_hub_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not connect to rank 0 within 0.1 s"):
        Listener().accept([1, 2], 0.1)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
    with pytest.raises(
        TimeoutError, match=f"cannot connect to rank 0 at port {port} of 127.0.0.1: .*refused"
    ):
        connect(Address(("127.0.0.1",), port, "token"), {"rank": 1}, 0.3)


# -- being asked to stop --------------------------------------------------------------------------------------


def stop_when_asked(rank: int, world_size: int) -> None:
    with GracefulShutdown() as shutdown:
        print("ready", flush=True)
        step = 0
        while not shutdown.should_stop():
            step += 1
            time.sleep(0.01 * rank)
        time.sleep(0.5)  # saving
    print(json.dumps({"step": step, "asked": shutdown.requested}), flush=True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_ranks_stop_at_one_step(tmp_path: Path, number: signal.Signals) -> None:
    ranks = MortalRanks(stop_when_asked, 3, tmp_path / "ranks")
    ranks.wait_for_line("ready")
    time.sleep(0.3)
    for _ in range(3):  # as from a terminal and its launcher: one request
        os.kill(ranks.pids[2], number)
        time.sleep(0.05)
    assert ranks.wait() == [0, 0, 0]
    results = [json.loads(ranks.log(rank).splitlines()[-1]) for rank in range(3)]
    assert len({result["step"] for result in results}) == 1
    assert results[0]["step"] >= 1
    assert [result["asked"] for result in results] == [False, False, True]


def ignore_requests(rank: int, world_size: int) -> None:
    with GracefulShutdown(merge_s=0.5):
        print("ready", flush=True)
        dist.recv(torch.empty(1), src=1 - rank)  # for ever, and no Python runs on this thread


def test_second_signal_ends_a_stuck_rank_at_once(tmp_path: Path) -> None:
    ranks = MortalRanks(ignore_requests, 2, tmp_path / "ranks")
    ranks.wait_for_line("ready")
    os.kill(ranks.pids[0], signal.SIGTERM)
    ranks.wait_for_line("SIGTERM: stopping after this step; send it again to stop at once", [0])
    time.sleep(0.7)
    os.kill(ranks.pids[0], signal.SIGINT)
    codes = ranks.wait(20.0)
    assert codes[0] == 128 + signal.SIGINT
    assert ranks.log(0).endswith("SIGINT again: stopping at once\n")


def test_shutdown_without_process_group_restores_what_was() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with GracefulShutdown(signals=(signal.SIGTERM,)) as shutdown:
        assert not shutdown.should_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10.0
        while not shutdown.requested and time.monotonic() < deadline:
            time.sleep(0.01)
        assert shutdown.should_stop()
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


def have_a_child(rank: int, world_size: int) -> None:
    with GracefulShutdown() as shutdown:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, b"!")
            time.sleep(CHILD_S)
            os._exit(0)
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        time.sleep(0.2)
        assert not shutdown.requested


def test_signals_to_a_forked_child_are_its_own(tmp_path: Path) -> None:
    ranks = MortalRanks(have_a_child, 1, tmp_path / "ranks")
    assert ranks.wait() == [0], ranks.log(0)


def test_shutdown_needs_the_main_thread() -> None:
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            GracefulShutdown().__enter__()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
