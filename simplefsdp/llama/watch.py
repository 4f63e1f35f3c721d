"""Noticing that a rank has died, and ending the others with a message that names it.

Owns: who is alive, what is said about those that are not, when this process ends because of another. Must not
know: training. Sockets are peer_link.py's, signals shutdown.py's.

Every rank runs one thread. Rank 0's is the hub, connected to all others:

    rank r -> hub   {"beat": step} every interval; {"failed": line, "beat": step}; {"bye": true}
    hub -> rank r   {"beat": step} every interval; {"verdict": [[rank, sentence], ...], "more": number}

A rank is lost when its connection ends without a goodbye (its process died, by kill -9 too), when it says
that it failed (an exception leaves the `with` block), or when its beats stop (its machine is gone, or it is
stopped). The hub waits `settle_s` for what other ranks have to say, because one death makes the collectives of
others fail, then sends its verdict: the dead first, then failures in the order they were told. Each thread
prints it and ends its process, whatever the main thread is stuck in. If the hub itself is lost, every rank
sees that for itself.

[Note: SIGTERM] Launchers such as torchrun end all ranks by SIGTERM as soon as one died, perhaps before the
verdict. `GracefulShutdown` holds that signal off: enter it before this and leave it after.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import torch.distributed as dist

from simplefsdp.llama.agreement import one_line
from simplefsdp.llama.peer_link import Address, Listener, Message, PeerLink, connect
from simplefsdp.llama.shutdown import GracefulShutdown, exit_now, say

__all__ = ["EXIT_PEER_LOST", "GracefulShutdown", "RankWatch"]

# Exit code of a rank that ends because another one did.
EXIT_PEER_LOST = 3
CONNECT_TIMEOUT_S = 60.0
# How long the hub stays after its verdict for the others to read it.
LINGER_S = 2.0
# How long a main thread that is already raising may take to end the process by itself.
UNWIND_TIMEOUT_S = 10.0
# How long a raising rank waits for the hub's verdict, besides the settling time.
VERDICT_MARGIN_S = 5.0
# The main thread posts one message and leaves.
RINGS_PER_ROUND = 16
# If thousands of ranks fail, each of them should not print thousands of lines.
MAX_LINES = 8
MAX_REASON_CHARACTERS = 500


@dataclass
class _Peer:
    """A rank as its messages describe it."""

    rank: int
    host: str
    pid: int
    step: int = 0
    seen_at: float = 0.0  # time.monotonic() of its last message
    is_watched: bool = True

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid}, last reported step {self.step})"

    def died(self) -> _Loss:
        return _Loss(self.rank, f"{self} died without a word", None)

    def failed(self, reason: str) -> _Loss:
        return _Loss(self.rank, f"{self} failed: {reason}", reason)

    def find_silence(self, timeout_s: float) -> _Loss | None:
        silent_s = time.monotonic() - self.seen_at
        if not self.is_watched or silent_s < timeout_s:
            return None
        return _Loss(self.rank, f"{self} has given no sign of life for {silent_s:.0f} s", None)


@dataclass(frozen=True)
class _Loss:
    """Why a rank is not going on; `reason` is the exception it raised, None if it died or fell silent."""

    rank: int
    sentence: str
    reason: str | None


@dataclass(frozen=True)
class _Verdict:
    """What befell which rank, as a sentence, and how many further ranks are not listed."""

    sentences: list[tuple[int, str]]
    more: int = 0


@dataclass(frozen=True)
class _Round:
    """What one look at the connections found."""

    arrived: list[tuple[_Peer, Message]]
    gone: list[_Peer]
    posted: list[Message]  # by this rank's main thread


class RankWatch:
    """Ends this process, with a message that names the culprit, when another rank dies, fails or falls silent.

    A context manager, entered by all ranks together after torch.distributed is initialised. An exception that
    leaves it is told to the other ranks. Leaving it normally is a goodbye; rank 0 stays until all have said
    theirs. With one rank it does nothing.

    Args:
        interval_s: seconds between two signs of life of a rank.
        timeout_s: seconds without one until a rank counts as lost; at least twice `interval_s`. Only matters
            where a rank's connection stays open: a dead machine, a stopped process.
        settle_s: seconds to collect the accounts of other ranks after the first loss.

    Attributes:
        step: set it as training goes on; what other ranks print as this rank's last step.
    """

    def __init__(self, *, interval_s: float = 2.0, timeout_s: float = 40.0, settle_s: float = 1.0) -> None:
        if not 0 < 2 * interval_s <= timeout_s:
            raise ValueError(
                f"timeout_s must be at least twice interval_s: got {timeout_s:g} and {interval_s:g}"
            )
        self.step = 0
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._settle_s = settle_s
        self._me = _Peer(0, socket.gethostname(), os.getpid())
        self._links: dict[int, PeerLink] = {}
        self._peers: dict[int, _Peer] = {}
        self._posted: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._bell: socket.socket | None = None  # rung by the main thread, heard by the other
        self._ringer: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._is_leaving = False  # an exception is on its way out of the main thread
        self._is_decided = threading.Event()

    def __enter__(self) -> RankWatch:
        """Connect to the other ranks and start watching them. Collective.

        Raises:
            RuntimeError: torch.distributed is not initialised.
            TimeoutError: a rank cannot reach rank 0.
        """
        if not dist.is_initialized():
            raise RuntimeError("RankWatch needs torch.distributed.init_process_group first")
        self._me.rank = dist.get_rank()
        world_size = dist.get_world_size()
        if world_size == 1:
            return self
        me = {"rank": self._me.rank, "host": self._me.host, "pid": self._me.pid}
        listener = Listener() if self._me.rank == 0 else None
        box: list[tuple[Address, Message] | None] = [(listener.address, me) if listener else None]
        dist.broadcast_object_list(box, src=0)
        assert box[0] is not None
        address, hub = box[0]
        if listener is not None:
            met = listener.accept(range(1, world_size), CONNECT_TIMEOUT_S)
        else:
            met = [(connect(address, me, CONNECT_TIMEOUT_S), hub)]
        for link, hello in met:
            rank = hello["rank"]
            self._links[rank] = link
            self._peers[rank] = _Peer(rank, hello["host"], hello["pid"], seen_at=time.monotonic())
        # A forked child (a data loader's worker) would keep the connections open after this process died.
        os.register_at_fork(after_in_child=functools.partial(_close_in_child, weakref.ref(self)))
        self._bell, self._ringer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._post({"bye": True})
            self._thread.join()
            return
        # Others may be stuck in a collective with this rank: tell them, and hear whether this rank was the first.
        self._is_leaving = True
        self._post({"failed": one_line(error)[:MAX_REASON_CHARACTERS], "beat": self.step})
        self._is_decided.wait(self._settle_s + VERDICT_MARGIN_S)

    def _post(self, message: Message) -> None:
        assert self._ringer is not None
        self._posted.put(message)
        with contextlib.suppress(OSError):  # closed: the thread has ended
            self._ringer.send(b"!")

    def _close(self) -> None:
        for end in (*self._links.values(), self._bell, self._ringer):
            if end is not None:
                end.close()

    # -- on the thread of every rank --

    def _run(self) -> None:
        try:
            if self._me.rank == 0:
                self._run_hub()
            else:
                self._run_spoke()
        finally:
            self._close()

    def _rounds(self) -> Iterator[_Round]:
        """Look at the connections whenever something comes, and regularly; give signs of life in between."""
        assert self._bell is not None
        beat_at = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while True:
                slept_from = time.monotonic()
                ready = [key.data for key, _ in selector.select(self._interval_s / 2)]
                now = time.monotonic()
                # If this very process was stopped, the silence of others in that time means nothing.
                paused_s = max(0.0, now - slept_from - self._interval_s)
                arrived, gone = [], []
                for peer in self._peers.values():
                    peer.seen_at += paused_s
                    if peer.rank not in ready:
                        continue
                    messages, is_open = self._links[peer.rank].receive()
                    for message in messages:
                        peer.seen_at = now
                        peer.step = int(message.get("beat", peer.step))
                        arrived.append((peer, message))
                    if not is_open:
                        selector.unregister(self._links[peer.rank])
                        gone.append(peer)
                posted = []
                if None in ready:
                    posted = [self._posted.get() for _ in self._bell.recv(RINGS_PER_ROUND)]
                if now >= beat_at:
                    beat_at = now + self._interval_s
                    for link in self._links.values():
                        link.send({"beat": self.step})
                yield _Round(arrived, gone, posted)

    def _end(self, verdict: _Verdict) -> None:
        """Print what befell the ranks and end this process, unless it is ending on its own account alone."""
        me = self._me.rank
        told = [sentence for rank, sentence in verdict.sentences if rank != me or not self._is_leaving]
        for sentence in told:
            say(f"[rank {me}] {sentence}")
        if verdict.more:
            say(f"[rank {me}] and {verdict.more} more ranks")
        self._is_decided.set()
        if not told:
            return
        if self._is_leaving:
            time.sleep(UNWIND_TIMEOUT_S)  # this is a daemon thread: usually the process ends before
        else:
            say(f"[rank {me}] ending at step {self.step}, because training needs all ranks")
        exit_now(EXIT_PEER_LOST)

    # -- on the thread of ranks other than 0 --

    def _run_spoke(self) -> None:
        hub = self._peers[0]
        for found in self._rounds():
            for _, message in found.arrived:
                if "verdict" in message:
                    sentences = [(rank, sentence) for rank, sentence in message["verdict"]]
                    return self._end(_Verdict(sentences, message["more"]))
            loss = hub.died() if found.gone else hub.find_silence(self._timeout_s)
            if loss is not None:
                return self._end(_Verdict([(loss.rank, loss.sentence)]))
            for message in found.posted:
                self._links[0].send(message)
                if "bye" in message:
                    return None
        return None

    # -- on the thread of rank 0 --

    def _run_hub(self) -> None:
        losses: dict[int, _Loss] = {}
        decide_at = float("inf")
        for found in self._rounds():
            self._me.step = self.step
            news = [*found.arrived, *((self._me, message) for message in found.posted)]
            lost = [peer.failed(message["failed"]) for peer, message in news if "failed" in message]
            for peer, message in news:
                if "failed" in message or "bye" in message:
                    peer.is_watched = False
            lost += [peer.died() for peer in found.gone if peer.is_watched]
            lost += [loss for peer in self._peers.values() if (loss := peer.find_silence(self._timeout_s))]
            for loss in lost:
                losses.setdefault(loss.rank, loss)
                if loss.rank in self._peers:
                    self._peers[loss.rank].is_watched = False
            if lost:
                decide_at = min(decide_at, time.monotonic() + self._settle_s)
            if time.monotonic() >= decide_at or len(losses) > len(self._peers):
                return self._decide(list(losses.values()))
            if not losses and not any(peer.is_watched for peer in (self._me, *self._peers.values())):
                return None  # everybody has said goodbye
        return None

    def _decide(self, losses: list[_Loss]) -> None:
        """Tell every rank what befell which rank, then end."""
        reasons = {loss.reason for loss in losses}
        if len(losses) > len(self._peers) and len(reasons) == 1 and None not in reasons:
            losses = []  # all ranks agree on what is wrong, and each is about to say so itself
        losses.sort(key=lambda loss: loss.reason is not None)
        shown = [(loss.rank, loss.sentence) for loss in losses[:MAX_LINES]]
        verdict = _Verdict(shown, len(losses) - len(shown))
        for link in self._links.values():
            link.send({"verdict": verdict.sentences, "more": verdict.more})
            link.finish_sending()
        deadline = time.monotonic() + LINGER_S
        reading = list(self._links.values())
        while reading and time.monotonic() < deadline:
            time.sleep(LINGER_S / 100)
            reading = [link for link in reading if link.receive()[1]]
        self._end(verdict)


def _close_in_child(reference: weakref.ref[RankWatch]) -> None:
    watch = reference()
    if watch is not None:
        watch._close()
