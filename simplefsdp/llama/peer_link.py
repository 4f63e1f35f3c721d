"""Small messages between ranks on connections of their own, readable while the ranks' main threads are stuck.

Owns: sockets, framing, finding each other. Must not know: what the messages mean.

Rank 0 listens, every other rank connects to it. A message is one line of JSON with a dict in it. When a process
dies, however it dies, its operating system closes its end, and the other end reads end-of-file.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

RECEIVE_BYTES = 1 << 16
# Longest first message; a rank's is far shorter.
MAX_HELLO_BYTES = 1 << 12
HELLO_TIMEOUT_S = 5.0
RETRY_S = 0.1

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class PeerLink:
    """One end of a connection. Not thread-safe.

    Args:
        connection: connected; becomes non-blocking.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # no such option: not TCP
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._received = b""

    def fileno(self) -> int:
        """Return the file descriptor, for `select`."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a short message, unless the other end is gone or has not read for very long."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> tuple[list[Message], bool]:
        """Return the messages that have arrived, and whether the other end is still there."""
        is_open = True
        try:
            while chunk := self._connection.recv(RECEIVE_BYTES):
                self._received += chunk
            is_open = False
        except BlockingIOError:
            pass
        except OSError:  # reset: its process is gone
            is_open = False
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines], is_open

    def finish_sending(self) -> None:
        """Tell the other end that nothing more will come; it can still read all that was sent."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end. In a forked child: the parent's end stays open."""
        self._connection.close()


@dataclass(frozen=True)
class Address:
    """How to reach rank 0's listener.

    Attributes:
        hosts: names and addresses to try, in this order.
        port: TCP port.
        token: secret that a connection has to begin with.
    """

    hosts: tuple[str, ...]
    port: int
    token: str


class Listener:
    """Rank 0's side of setting up: a port of its own, on all interfaces unless the run is on loopback."""

    def __init__(self) -> None:
        master = os.environ.get("MASTER_ADDR", "")
        if master in _LOOPBACK:
            family = socket.AF_INET6 if ":" in master else socket.AF_INET
            self._socket = socket.create_server((master, 0), family=family, backlog=socket.SOMAXCONN)
        elif socket.has_dualstack_ipv6():
            self._socket = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN
            )
        else:
            self._socket = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
        # The first is where the ranks found the rendezvous of torch.distributed, which rank 0's machine serves.
        hosts = dict.fromkeys(filter(None, (master, socket.gethostname(), "localhost")))
        self.address = Address(tuple(hosts), self._socket.getsockname()[1], secrets.token_hex())

    def accept(self, ranks: Iterable[int], timeout_s: float) -> list[tuple[PeerLink, Message]]:
        """Wait until the given ranks have connected, and stop listening.

        Returns:
            Each one's link and the message it began with, which holds its "rank".

        Raises:
            TimeoutError: names the missing ranks.
        """
        missing = set(ranks)
        links = []
        deadline = time.monotonic() + timeout_s
        with self._socket:
            while missing:
                self._socket.settimeout(max(0.0, deadline - time.monotonic()))
                try:
                    connection, _ = self._socket.accept()
                except (TimeoutError, BlockingIOError) as error:
                    raise TimeoutError(
                        f"ranks {sorted(missing)} did not connect to rank 0 within {timeout_s:g} s; "
                        f"is port {self.address.port} on {self.address.hosts[0]} closed to them?"
                    ) from error
                hello = self._greet(connection)
                if hello is None or hello["rank"] not in missing:
                    connection.close()
                    continue
                missing.discard(hello["rank"])
                links.append((PeerLink(connection), hello))
        return links

    def _greet(self, connection: socket.socket) -> Message | None:
        """Return a rank's first message and answer it; None if the connection is not from a rank of this run."""
        connection.settimeout(HELLO_TIMEOUT_S)
        try:
            with connection.makefile("rb") as stream:
                hello: Message = json.loads(stream.readline(MAX_HELLO_BYTES))
            if not hmac.compare_digest(str(hello["token"]), self.address.token):
                return None
            connection.sendall(b"\n")
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return hello


def connect(address: Address, hello: Message, timeout_s: float) -> PeerLink:
    """Connect to rank 0, beginning with a message.

    Raises:
        TimeoutError: no host of the address answered as rank 0 would; names the last error.
    """
    deadline = time.monotonic() + timeout_s
    failure: OSError | None = None
    while time.monotonic() < deadline:
        for host in address.hosts:
            remaining_s = max(RETRY_S, deadline - time.monotonic())
            try:
                connection = socket.create_connection((host, address.port), remaining_s)
            except OSError as error:
                failure = error
                continue
            try:
                connection.sendall(json.dumps({**hello, "token": address.token}).encode() + b"\n")
                if connection.recv(1) == b"\n":
                    return PeerLink(connection)
            except OSError as error:
                failure = error
            connection.close()
        time.sleep(RETRY_S)
    raise TimeoutError(
        f"cannot connect to rank 0 at port {address.port} of {', '.join(address.hosts)}: "
        f"{failure or 'something else answers there'}"
    )
