"""The departure side's door: one listening socket for all channels of a transport, and the hellos that knock on it.

A connection is a stranger until its hello proves that it knows the cluster's secret, the token of a waiting channel, and that channel's
challenge. A stranger costs one descriptor and `HELLO_BYTES` of memory, for at most `Limits.establish_s`, and at most
`Limits.max_pending_hellos` of them are held.

Never: reads a byte beyond the hello, or tells a stranger why it was refused.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transport.contract import RingGeometry
from transport.errors import TransportRefused
from transport.limits import Limits
from transport.tcp.wire import HELLO_BYTES, Hello, pack_reply, prove, unpack_hello


@dataclass(frozen=True, slots=True)
class Expected:
    """A departure end that waits for its landing side. `accept` takes over the connected socket."""

    token: bytes
    challenge: bytes
    geometry: RingGeometry
    accept: Callable[[socket.socket], None]


class Listener:
    """Accepts connections and hands those with a good hello to the channel they name."""

    def __init__(self, address: tuple[str, int], secret: bytes, limits: Limits) -> None:
        """Listen at once, in the running loop; `TransportRefused` if the address cannot be had."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._server = socket.create_server(address, family=family, backlog=limits.max_pending_hellos)
        except OSError as error:
            raise TransportRefused(f"cannot listen on {address[0]}:{address[1]}: {error.strerror or error}") from error
        self._server.setblocking(False)
        self._secret = secret
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._expected: dict[bytes, Expected] = {}
        self._strangers: set[Stranger] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._refused: Counter[str] = Counter()
        self._loop.add_reader(self._server, self._on_connection)

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._server.getsockname()[1]
        return port

    @property
    def refused(self) -> Mapping[str, int]:
        """Connections that were closed unheard, by reason: crowded, late, left, malformed, token, geometry, proof."""
        return self._refused

    def expect(self, expected: Expected) -> None:
        """Let the landing side of this channel in, once."""
        self._expected[expected.token] = expected

    def forget(self, token: bytes) -> None:
        """This channel is not waiting any more. Idempotent."""
        self._expected.pop(token, None)

    def close(self) -> None:
        """Close the door and send the strangers away. Idempotent."""
        if self._server.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._server)
        self._server.close()
        for stranger in tuple(self._strangers):
            stranger.close()
        self._strangers.clear()
        self._expected.clear()

    def _on_connection(self) -> None:
        for _ in range(self._limits.max_pending_hellos):
            try:
                stream, _peer = self._server.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(self._server)
                self._pause = self._loop.call_later(self._limits.accept_pause_s, self._resume)
                return
            stream.setblocking(False)
            if len(self._strangers) >= self._limits.max_pending_hellos:
                self._refused["crowded"] += 1
                stream.close()
            else:
                self._strangers.add(Stranger(stream, self, self._limits.establish_s))

    def _resume(self) -> None:
        self._loop.add_reader(self._server, self._on_connection)

    def on_gone(self, stranger: Stranger, reason: str) -> None:
        """A stranger left, or took too long."""
        self._strangers.discard(stranger)
        self._refused[reason] += 1
        stranger.close()

    def on_hello(self, stranger: Stranger, data: bytes) -> None:
        """Judge a whole hello; only a good one changes anything."""
        hello = unpack_hello(data)
        expected = None if isinstance(hello, str) else self._expected.get(hello.token)
        fault = self._fault(hello, expected)
        if fault is not None or expected is None:
            return self.on_gone(stranger, fault or "token")
        proof = prove(self._secret, b"departure", expected.token, expected.challenge, expected.geometry)
        try:
            num_written = stranger.stream.send(pack_reply(proof))
        except OSError:
            return self.on_gone(stranger, "left")
        assert num_written == len(pack_reply(proof)), "a fresh connection takes the whole reply"
        self._strangers.discard(stranger)
        self.forget(expected.token)
        expected.accept(stranger.hand_over())
        return None

    def _fault(self, hello: Hello | str, expected: Expected | None) -> str | None:
        if isinstance(hello, str):
            return "malformed"
        if expected is None:
            return "token"
        wanted = prove(self._secret, b"landing", expected.token, expected.challenge, expected.geometry)
        if not hmac.compare_digest(hello.proof, wanted):
            return "geometry" if hello.geometry != expected.geometry else "proof"
        return None


class Stranger:
    """A connection that has not said its whole hello."""

    def __init__(self, stream: socket.socket, listener: Listener, establish_s: float) -> None:
        """Read in the running loop until the hello is whole or it is too late."""
        self.stream = stream
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._hello = b""
        self._loop.add_reader(stream, self._on_readable)
        self._deadline = self._loop.call_later(establish_s, self._listener.on_gone, self, "late")

    def close(self) -> None:
        """Send it away. Idempotent."""
        self.hand_over().close()

    def hand_over(self) -> socket.socket:
        """Stop reading and give the socket away."""
        self._deadline.cancel()
        if self.stream.fileno() >= 0:
            self._loop.remove_reader(self.stream)
        return self.stream

    def _on_readable(self) -> None:
        try:
            data = self.stream.recv(HELLO_BYTES - len(self._hello))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._hello += data
        if not data:
            self._listener.on_gone(self, "left")
        elif len(self._hello) == HELLO_BYTES:
            self._listener.on_hello(self, self._hello)
