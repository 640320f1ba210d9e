"""Which transport carries the blocks of a server: decided once, at its start, and said.

Never: falls back in silence from a transport that was asked for by name.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

from transport.contract import Transport
from transport.errors import TransportError, TransportRefused
from transport.rdma import DeviceChoice, open_rdma, self_test
from transport.tcp.transport import TcpTransport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """What the operator asks for: `auto`, `tcp` or `rdma`.

    For tcp: `host` is listened on, and peers are told to connect to `advertise`, or to `host` where that is empty. For rdma:
    `NAME[:PORT[:GID_INDEX]]`, or nothing for the first that can be used.
    """

    name: str
    host: str
    advertise: str = ""
    rdma_device: str = ""


@dataclass(frozen=True, slots=True)
class ChosenTransport:
    """The transport, and one line on how it came to be chosen."""

    transport: Transport
    account: str


async def choose_transport(choice: TransportChoice, secret: str) -> ChosenTransport:
    """`rdma` only on a device that has passed its self-test; `TransportRefused` if it was asked for and cannot be had.

    `auto` is rdma where it can be had, else tcp. The account says what was found, and goes to the log and the server's status.
    """
    if choice.name == "tcp":
        chosen = ChosenTransport(_tcp(choice, secret), "tcp, as asked")
    elif choice.name == "rdma":
        chosen = await _rdma(choice)
    elif choice.name == "auto":
        try:
            chosen = await _rdma(choice)
        except TransportRefused as error:
            chosen = ChosenTransport(_tcp(choice, secret), f"tcp, since rdma cannot be had: {error}")
    else:
        raise TransportRefused(f"unknown transport {choice.name!r}: choose auto, tcp or rdma")
    logger.info("transport.chosen", extra={"transport": chosen.transport.name, "account": chosen.account})
    return chosen


def _tcp(choice: TransportChoice, secret: str) -> Transport:
    return TcpTransport(secret, choice.host, advertise=choice.advertise)


async def _rdma(choice: TransportChoice) -> ChosenTransport:
    try:
        device = DeviceChoice.parse(choice.rdma_device)
    except ValueError as error:
        raise TransportRefused(f"--rdma-device: {error}") from error
    transport = open_rdma(device)
    checks = await self_test(transport)
    for check in checks:
        logger.info(
            "transport.self_test", extra={"fact": check.fact, "fault": check.fault, "seconds": round(check.seconds, 3)}
        )
    faults = [f"not seen that {check.fact}: {check.fault}" for check in checks if check.fault is not None]
    if faults:
        with suppress(TransportError):  # of a device that fails its self-test anything may fail
            await transport.close()
        raise TransportRefused(f"{transport.link} fails its self-test: {'; '.join(faults)}")
    seconds = sum(check.seconds for check in checks)
    return ChosenTransport(transport, f"rdma on {transport.link}, self-test passed in {seconds:.2f} s")
