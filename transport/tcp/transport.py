"""The tcp transport: makes channels and owns the listener they share.

Never: outlives its event loop, or accepts a channel without the cluster's secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from transport.contract import RingGeometry
from transport.errors import TransportRefused
from transport.limits import Limits
from transport.tcp.channel import TcpDeparture, TcpLanding
from transport.tcp.listener import Expected, Listener
from transport.tcp.wire import MAX_HOST_BYTES, RANDOM_BYTES, Answer, unpack_offer


class TcpTransport:
    """Channels over TCP, plain text, both ends proven with the cluster's secret."""

    def __init__(
        self, secret: str, host: str = "127.0.0.1", limits: Limits | None = None, port: int = 0, advertise: str = ""
    ) -> None:
        """Listens on `host`; landing sides are told to connect to `advertise`, or to `host` if empty. Port 0: any free one."""
        if not secret:
            raise TransportRefused("a tcp transport needs the cluster's secret")
        for name in (host, advertise or host):
            if not name or not name.isascii() or len(name) > MAX_HOST_BYTES:
                raise TransportRefused(f"{name!r} is no host to listen on, or to be reached at")
        self._secret = secret.encode()
        self._address = (host, port)
        self._reached_at = advertise or host
        self._limits = limits or Limits()
        self._listener: Listener | None = None
        self._is_closed = False

    @property
    def name(self) -> str:
        """`tcp`."""
        return "tcp"

    @property
    def refused_hellos(self) -> Mapping[str, int]:
        """Connections closed without a good hello, by reason."""
        return {} if self._listener is None else self._listener.refused

    async def open_landing(self, geometry: RingGeometry) -> TcpLanding:
        """Allocate a landing ring; nothing listens for it."""
        self._check_open()
        return TcpLanding(geometry, self._secret, self._limits)

    async def open_departure(self, geometry: RingGeometry, offer: bytes) -> tuple[TcpDeparture, bytes]:
        """Allocate a departure ring and expect the landing side; `TransportRefused` names what does not fit."""
        self._check_open()
        parsed = unpack_offer(offer)
        if isinstance(parsed, str):
            raise TransportRefused(f"tcp offer: {parsed}")
        if parsed.geometry != geometry:
            raise TransportRefused(f"the landing side has {parsed.geometry}, this side {geometry}")
        listener = self._listening()
        token = secrets.token_bytes(RANDOM_BYTES)
        departure = TcpDeparture(geometry, self._limits, lambda: listener.forget(token))
        listener.expect(Expected(token, parsed.challenge, geometry, departure.accept))
        return departure, Answer(self._reached_at, listener.port, token).pack()

    async def close(self) -> None:
        """Close the listener; open channels go on, waiting ones will not be connected."""
        self._is_closed = True
        if self._listener is not None:
            self._listener.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportRefused("the tcp transport was closed")

    def _listening(self) -> Listener:
        if self._listener is None:
            self._listener = Listener(self._address, self._secret, self._limits)
        return self._listener
