"""The block channel over RDMA (libibverbs through pyverbs).

Importing this needs no pyverbs; `open_rdma` does, and says so. Never: hides why RDMA cannot be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from transport.errors import TransportRefused
from transport.limits import Limits
from transport.rdma.devices import DeviceChoice, Link

if TYPE_CHECKING:
    from transport.rdma.self_test import Check
    from transport.rdma.transport import RdmaTransport

__all__ = ["DeviceChoice", "open_rdma", "self_test", "usable_link"]


def open_rdma(choice: DeviceChoice, limits: Limits | None = None) -> RdmaTransport:
    """An rdma transport on the chosen device; `TransportRefused` says what is missing and what to do."""
    with _needing_pyverbs():
        from transport.rdma.transport import RdmaTransport  # noqa: PLC0415 - pyverbs may be absent, and is wanted only here
    return RdmaTransport(choice, limits)


def usable_link(choice: DeviceChoice) -> Link:
    """The device, port and GID that `open_rdma` would use, which stay closed; `TransportRefused` likewise."""
    with _needing_pyverbs():
        from transport.rdma.transport import chosen_link  # noqa: PLC0415 - as above
    return chosen_link(choice)


async def self_test(transport: RdmaTransport) -> list[Check]:
    """What the transport's device shows of the facts that safety stands on, see `transport.rdma.self_test`."""
    from transport.rdma.self_test import try_device  # noqa: PLC0415 - as above

    return await try_device(transport)


@contextmanager
def _needing_pyverbs() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise TransportRefused(
            f"pyverbs cannot be imported ({error}): install Debian's python3-pyverbs and ibverbs-providers, or pip install pyverbs"
        ) from error
