"""The bytes of the rdma transport: offer, answer, and the messages of an open channel. Little endian.

    offer    (landing -> departure, by the owner)   magic, version, slot_bytes, num_slots, address of the queue pair, ring address, ring key
    answer   (departure -> landing, by the owner)   magic, version, address of the queue pair
    frames   (departure -> landing)   RDMA WRITE with immediate into consecutive slots; the immediate is the first frame's number modulo 2^32.
             All but the last of its frames fill their slots, so the length says how many there are.
    probe    (departure -> landing)   SEND of kind, 0
    credit   (landing -> departure)   SEND of kind, total of released frames; the first one says that the landing side is connected, one repeated
             unchanged is a probe

Offer and answer travel over the servers' authenticated connection: they hold the numbers without which no packet is accepted.

Never: does I/O, or trusts a length.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from transport.contract import RingGeometry
from transport.rdma.devices import GID_BYTES

VERSION = 1

_ADDRESS = struct.Struct(f"<IIHBB{GID_BYTES}s")
_OFFER = struct.Struct(f"<4sHQI{_ADDRESS.size}sQI")
_ANSWER = struct.Struct(f"<4sH{_ADDRESS.size}s")
_MESSAGE = struct.Struct("<8sQ")

MESSAGE_BYTES = _MESSAGE.size
PROBE = b"kvlprobe"
CREDIT = b"kvlcredt"

_MAX_24_BITS = (1 << 24) - 1
_MAX_MTU = 5


@dataclass(frozen=True, slots=True)
class QueuePairAddress:
    """Where a queue pair is reached. `gid` is `None` where the LID alone says it (InfiniBand)."""

    number: int
    first_psn: int
    lid: int
    mtu: int
    gid: bytes | None

    def pack(self) -> bytes:
        """For an offer or an answer."""
        return _ADDRESS.pack(
            self.number, self.first_psn, self.lid, self.mtu, self.gid is not None, self.gid or bytes(GID_BYTES)
        )


@dataclass(frozen=True, slots=True)
class Offer:
    """What the departure side needs: where to connect to, and where to write."""

    geometry: RingGeometry
    queue_pair: QueuePairAddress
    ring_address: int
    ring_key: int

    def pack(self) -> bytes:
        """The opaque bytes of `Landing.offer`."""
        geometry = self.geometry
        return _OFFER.pack(
            b"kvlR",
            VERSION,
            geometry.slot_bytes,
            geometry.num_slots,
            self.queue_pair.pack(),
            self.ring_address,
            self.ring_key,
        )


@dataclass(frozen=True, slots=True)
class Message:
    """What a SEND carries."""

    kind: bytes
    number: int

    def pack(self) -> bytes:
        """`MESSAGE_BYTES` bytes."""
        return _MESSAGE.pack(self.kind, self.number)


def pack_answer(queue_pair: QueuePairAddress) -> bytes:
    """The opaque bytes that `Landing.establish` takes."""
    return _ANSWER.pack(b"kvlr", VERSION, queue_pair.pack())


def unpack_offer(data: bytes) -> Offer | str:
    """Read an offer; a text says why it is none."""
    if len(data) != _OFFER.size:
        return f"an offer has {_OFFER.size} bytes, this one {len(data)}"
    magic, version, slot_bytes, num_slots, packed, ring_address, ring_key = _OFFER.unpack(data)
    fault = _check_start("an offer", magic, b"kvlR", version)
    if fault is not None:
        return fault
    try:
        geometry = RingGeometry(slot_bytes, num_slots)
    except ValueError as error:
        return str(error)
    if ring_address + geometry.ring_bytes > 1 << 64:
        return f"a ring of {geometry.ring_bytes} bytes at {ring_address:#x} ends behind the address space"
    queue_pair = _unpack_address(packed)
    return queue_pair if isinstance(queue_pair, str) else Offer(geometry, queue_pair, ring_address, ring_key)


def unpack_answer(data: bytes) -> QueuePairAddress | str:
    """Read an answer; a text says why it is none."""
    if len(data) != _ANSWER.size:
        return f"an answer has {_ANSWER.size} bytes, this one {len(data)}"
    magic, version, packed = _ANSWER.unpack(data)
    return _check_start("an answer", magic, b"kvlr", version) or _unpack_address(packed)


def unpack_message(data: memoryview) -> Message:
    """Read a message (`MESSAGE_BYTES`); any bytes give one, the caller checks every field."""
    return Message(*_MESSAGE.unpack(data))


def _unpack_address(data: bytes) -> QueuePairAddress | str:
    number, first_psn, lid, mtu, has_gid, gid = _ADDRESS.unpack(data)
    if not 0 < number <= _MAX_24_BITS or first_psn > _MAX_24_BITS:
        return f"queue pair {number} and packet number {first_psn} are not of 24 bits"
    if not 1 <= mtu <= _MAX_MTU:
        return f"MTU number {mtu} is not one of 1 to {_MAX_MTU}"
    if has_gid != any(gid):  # a flag of 0 or 1, as the GID says
        return "a queue pair at no GID, or at one that its flag denies"
    return QueuePairAddress(number, first_psn, lid, mtu, gid if has_gid else None)


def _check_start(what: str, magic: bytes, wanted: bytes, version: int) -> str | None:
    if magic != wanted:
        return f"{what} of rdma begins with {wanted!r}, this one with {magic!r}"
    if version != VERSION:
        return f"{what} of version {version}, this side speaks version {VERSION}"
    return None
