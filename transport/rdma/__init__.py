"""The block channel over RDMA (libibverbs through pyverbs).

Importing this needs no pyverbs; `open_rdma` does, and says so. Never: hides why RDMA cannot be had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.errors import TransportRefused
from transport.limits import Limits
from transport.rdma.devices import DeviceChoice

if TYPE_CHECKING:
    from transport.rdma.transport import RdmaTransport

__all__ = ["DeviceChoice", "open_rdma"]


def open_rdma(choice: DeviceChoice, limits: Limits | None = None) -> RdmaTransport:
    """An rdma transport on the chosen device; `TransportRefused` says what is missing and what to do."""
    try:
        from transport.rdma.transport import RdmaTransport  # noqa: PLC0415 - pyverbs may be absent, and is wanted only here
    except ImportError as error:
        raise TransportRefused(
            f"pyverbs cannot be imported ({error}): install Debian's python3-pyverbs and ibverbs-providers, or pip install 'kvlease[rdma]'"
        ) from error
    return RdmaTransport(choice, limits)
