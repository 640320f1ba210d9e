"""The block channel over TCP."""

from transport.tcp.transport import TcpTransport

__all__ = ["TcpTransport"]
