"""The receiving side of a transfer measurement: opens landing ends, takes blocks in, and says when each one was there.

Every method takes and gives plain JSON values, so that it can stand in this process or in another one (`partner`).

Never: loads torch unless blocks are to be copied in and verified, or an engine is to run beside.
"""
# ruff: noqa: PLC0415  a machine that measures a bare transport may have neither torch nor xxhash

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvlease.bench.figures import Document
from kvlease.bench.limits import Limits
from kvlease.bench.transfer.plan import BlockShape, cpu_s
from kvlease.bench.transfer.streams import StreamEnd
from kvlease.bench.transfer.transports import measured_transport
from transport.contract import Landing, RingGeometry, Transport

if TYPE_CHECKING:
    from kvlease.bench.transfer.engine_load import EngineLoad


class Target(Protocol):
    """What becomes of the blocks of one channel."""

    async def expect(self, num_blocks: int, order: str, seed: int, lease: str) -> None:
        """The next transfer has so many blocks, for places in this order; `lease`: its identities, in hex."""

    async def take(self, landing: Landing) -> list[float]:
        """Take them all; when each was there (s)."""

    def close(self) -> None:
        """Nothing comes any more."""


class DroppingTarget:
    """Gives each slot back at once: the transport alone."""

    def __init__(self) -> None:
        """Nothing is expected."""
        self._num_blocks = 0

    async def expect(self, num_blocks: int, order: str, seed: int, lease: str) -> None:
        """Only their number matters."""
        self._num_blocks = num_blocks

    async def take(self, landing: Landing) -> list[float]:
        """Receive and release."""
        arrivals = []
        for _ in range(self._num_blocks):
            slot = await landing.receive()
            arrivals.append(time.monotonic())
            landing.release(slot)
        return arrivals

    def close(self) -> None:
        """Nothing to end."""


@dataclass(slots=True)
class _Channel:
    """One landing end and where its blocks go."""

    transport: Transport
    landing: Landing
    target: Target
    taking: asyncio.Task[list[float]] | None = None
    cpu_s: float = 0.0

    async def close(self) -> None:
        """Take nothing more."""
        if self.taking is not None:
            self.taking.cancel()
            await asyncio.wait([self.taking])
        self.target.close()
        await self.landing.close()
        await self.transport.close()


class Receiving:
    """Channels by name, each with one transfer at a time: `open`, `establish`, then `expect` and `wait` for each transfer."""

    def __init__(self, limits: Limits) -> None:
        """Nothing is open."""
        self._limits = limits
        self._channels: dict[str, _Channel] = {}
        self._listener: socket.socket | None = None
        self._stream: StreamEnd | None = None
        self._load: EngineLoad | None = None

    async def open(self, order: Document) -> Document:
        """A landing end for `order` (channel, transport, secret, host, slot_bytes, num_slots, block_bytes, num_layers, num_blocks, sealed)."""
        transport = measured_transport(str(order["transport"]), str(order["secret"]), str(order["host"]))
        landing = await transport.open_landing(RingGeometry(_count(order, "slot_bytes"), _count(order, "num_slots")))
        self._channels[str(order["channel"])] = _Channel(transport, landing, _target(order))
        return {"offer": landing.offer.hex()}

    async def establish(self, order: Document) -> Document:
        """Connect, with the departure side's `answer`."""
        await self._channel(order).landing.establish(bytes.fromhex(str(order["answer"])))
        return {}

    async def expect(self, order: Document) -> Document:
        """Take in `num_blocks` blocks from now on, in `order`, drawn from `seed`, under `lease`."""
        channel = self._channel(order)
        await channel.target.expect(
            _count(order, "num_blocks"), str(order["order"]), _count(order, "seed"), str(order["lease"])
        )
        channel.cpu_s = cpu_s()
        channel.taking = asyncio.create_task(channel.target.take(channel.landing))
        return {}

    async def wait(self, order: Document) -> Document:
        """Until they are all there: `finished_at` (s, monotonic), `cpu_s`, and with `each` the time of every one."""
        channel = self._channel(order)
        assert channel.taking is not None, "nothing is expected"
        arrivals = await channel.taking
        spent = cpu_s() - channel.cpu_s
        return {"finished_at": arrivals[-1], "cpu_s": spent, "arrivals": arrivals if order.get("each") else []}

    async def listen(self, order: Document) -> Document:
        """Where the plain stream may connect."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(self._limits.answer_s)
        return {"port": self._listener.getsockname()[1]}

    async def accept(self, order: Document) -> Document:
        """Take the connection that was made."""
        assert self._listener is not None, "nobody listens"
        self._stream = StreamEnd(self._listener.accept()[0], self._limits)
        return {}

    async def drain(self, order: Document) -> Document:
        """Receive `num_bytes` of the plain stream, blocking: nothing else is to run meanwhile."""
        assert self._stream is not None, "there is no stream"
        before = cpu_s()
        arrivals = [self._stream.receive(_count(order, "num_bytes")) for _ in range(_count(order, "times"))]
        return {
            "finished_at": arrivals[-1],
            "cpu_s": cpu_s() - before,
            "arrivals": arrivals if order.get("each") else [],
        }

    async def load(self, order: Document) -> Document:
        """Begin to decode with the engine of folder `model`: `num_streams` sequences, until `unload`."""
        from kvlease.bench.transfer.engine_load import EngineLoad

        self._load = await EngineLoad.start(str(order["model"]), _count(order, "num_streams"))
        return {}

    async def unload(self, order: Document) -> Document:
        """End it: `steps_s`, the time of each step since `load`."""
        assert self._load is not None, "no engine runs"
        steps = await self._load.stop()
        self._load = None
        return {"steps_s": steps}

    async def shut(self, order: Document) -> Document:
        """Close the channel."""
        await self._channels.pop(str(order["channel"])).close()
        return {}

    async def leave(self) -> None:
        """Close everything, at the end."""
        while self._channels:
            await self._channels.popitem()[1].close()
        if self._load is not None:
            await self._load.stop()
        for end in (self._stream, self._listener):
            if end is not None:
                end.close()

    def _channel(self, order: Document) -> _Channel:
        return self._channels[str(order["channel"])]


def _target(order: Document) -> Target:
    if not order["sealed"]:
        return DroppingTarget()
    from kvlease.bench.transfer.sealed_target import VerifyingTarget

    shape = BlockShape(_count(order, "block_bytes"), _count(order, "num_layers"))
    return VerifyingTarget(shape, _count(order, "num_blocks"))


def _count(order: Document, name: str) -> int:
    value = order[name]
    assert isinstance(value, int), f"{name} is {value!r}"
    return value
