"""Which transport carries the blocks of a server: decided once, at its start.

Never: falls back in silence from a transport that was asked for by name.
"""

from __future__ import annotations

from transport.contract import Transport
from transport.errors import TransportRefused
from transport.tcp.transport import TcpTransport


def choose_transport(name: str, secret: str, host: str, advertise: str = "") -> Transport:
    """The transport for `auto`, `tcp` or `rdma`; `TransportRefused` with what to do instead.

    It listens on `host`; peers are told to connect to `advertise`, or to `host` where that is empty.
    """
    match name:
        case "auto" | "tcp":
            return TcpTransport(secret, host, advertise=advertise)
        case "rdma":
            raise TransportRefused("this build has no rdma transport: start with --transport tcp")
        case _:
            raise TransportRefused(f"unknown transport {name!r}: choose auto, tcp or rdma")
