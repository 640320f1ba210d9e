"""The rdma transport: makes channels on one port of one device, which it keeps open for them.

Never: falls back to anything else.
"""

from __future__ import annotations

from collections.abc import Callable

from transport.contract import RingGeometry
from transport.errors import TransportRefused, VerbsError
from transport.limits import Limits
from transport.rdma.channel import RdmaDeparture, RdmaLanding
from transport.rdma.devices import DeviceChoice, Link, PortFacts, choose_link
from transport.rdma.verbs import Device, device_names
from transport.rdma.wire import pack_answer, unpack_offer


class RdmaTransport:
    """Channels over reliable connected queue pairs. Whoever knows an offer or an answer can connect: they travel authenticated."""

    def __init__(self, choice: DeviceChoice = DeviceChoice(), limits: Limits | None = None) -> None:  # noqa: B008 - a frozen value
        """Open the chosen device; `TransportRefused` says why none can be used, and what to do."""
        self.link = chosen_link(choice)
        try:
            self.device = Device(self.link.device)
            try:
                self._max_work_requests = self.device.max_work_requests()
            except VerbsError:
                self.device.close()
                raise
        except VerbsError as error:
            raise TransportRefused(f"{self.link}: {error}") from error
        self.limits = limits or Limits()
        self._num_channels = 0
        self._is_closed = False

    @property
    def name(self) -> str:
        """`rdma`."""
        return "rdma"

    async def open_landing(self, geometry: RingGeometry) -> RdmaLanding:
        """Allocate and register a landing ring."""
        self._check(geometry)
        landing = RdmaLanding(self.device, self.link, geometry, self.limits, self._channel_forgotten())
        self._num_channels += 1
        return landing

    async def open_departure(self, geometry: RingGeometry, offer: bytes) -> tuple[RdmaDeparture, bytes]:
        """Allocate a departure ring and connect to the offer; `TransportRefused` names what does not fit."""
        self._check(geometry)
        parsed = unpack_offer(offer)
        if isinstance(parsed, str):
            raise TransportRefused(f"rdma offer: {parsed}")
        if parsed.geometry != geometry:
            raise TransportRefused(f"the landing side has {parsed.geometry}, this side {geometry}")
        departure = RdmaDeparture(self.device, self.link, parsed, self.limits, self._channel_forgotten())
        self._num_channels += 1
        return departure, pack_answer(departure.connection.address)

    async def close(self) -> None:
        """Open no more channels; the device is closed with the last one that is open. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._close_device_if_unused()

    def _check(self, geometry: RingGeometry) -> None:
        if self._is_closed:
            raise TransportRefused("the rdma transport was closed")
        num_needed = geometry.num_slots + self.limits.num_message_receives + 1
        if num_needed > self._max_work_requests:
            raise TransportRefused(
                f"{geometry.num_slots} slots need {num_needed} work requests, {self.link.device} holds {self._max_work_requests}: lower --ring-bytes"
            )

    def _channel_forgotten(self) -> Callable[[], None]:
        """What a channel calls when it is closed; again is nothing."""
        is_open = True

        def forget() -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                self._num_channels -= 1
                self._close_device_if_unused()

        return forget

    def _close_device_if_unused(self) -> None:
        if self._is_closed and not self._num_channels:
            self.device.close()


def all_ports() -> list[PortFacts]:
    """The ports of all devices that can be opened; `TransportRefused` if there are devices but none can."""
    ports: list[PortFacts] = []
    refusals: list[str] = []
    for name in device_names():
        try:
            ports += _ports_of(name)
        except VerbsError as error:
            refusals.append(f"{name}: {error}")
    if refusals and not ports:
        raise TransportRefused(f"{'; '.join(refusals)}: may this user open /dev/infiniband/uverbs*?")
    return ports


def _ports_of(name: str) -> list[PortFacts]:
    device = Device(name)
    try:
        return device.ports()
    finally:
        device.close()


def chosen_link(choice: DeviceChoice) -> Link:
    """The link that the choice comes to on this machine; `TransportRefused` says why there is none."""
    link = choose_link(all_ports(), choice)
    if isinstance(link, str):
        raise TransportRefused(link)
    return link
