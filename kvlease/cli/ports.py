"""Ports that are ours before, and between, the times that a server of ours listens on them.

Never: listens.
"""

from __future__ import annotations

import socket

from kvlease.cli.errors import ConfigurationError


def reserve_port(host: str, port: int) -> socket.socket:
    """A bound socket that never listens. Raises ConfigurationError when the port is in use.

    Linux lets another socket with SO_REUSEADDR bind and listen beside it, which our servers use, and gives the port to nobody who asks for any.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigurationError(f"--host {host}: not an address of this machine: {error.strerror}") from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigurationError(
            f"--port {port}: cannot listen on {host}:{port}: {error.strerror}; free it, or choose another with --port"
        ) from None
    return sock
