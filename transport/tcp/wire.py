"""The bytes of the tcp transport: offer, answer, hello, reply, and the messages of an open channel. Little endian.

    offer    (landing -> departure, by the owner)   magic, version, slot_bytes, num_slots, challenge
    answer   (departure -> landing, by the owner)   magic, version, port, token, host
    hello    (landing -> departure, first on the connection)   magic, version, slot_bytes, num_slots, token, proof
    reply    (departure -> landing, first on the connection)   magic, version, proof
    frame    (departure -> landing)   kind, num_bytes, sequence_number, then num_bytes of payload
    probe    (departure -> landing)   kind, 0, 0
    credit   (landing -> departure)   kind, 0, total of released frames; repeated unchanged it is a probe

A proof is an HMAC-SHA256 with the cluster's secret over the role, the version, the token of the departure side, the challenge of
the landing side and the geometry. Both random values are new for each channel, so no proof is of use twice.

Never: does I/O, or trusts a length.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

from transport.contract import RingGeometry

VERSION = 1
RANDOM_BYTES = 32

_PROOF_BYTES = hashlib.sha256().digest_size
_OFFER = struct.Struct(f"<4sHQI{RANDOM_BYTES}s")
_ANSWER = struct.Struct(f"<4sHH{RANDOM_BYTES}s")
_HELLO = struct.Struct(f"<4sHQI{RANDOM_BYTES}s{_PROOF_BYTES}s")
_REPLY = struct.Struct(f"<4sH{_PROOF_BYTES}s")
_MESSAGE = struct.Struct("<8sQQ")
_GEOMETRY = struct.Struct("<HQI")

HELLO_BYTES = _HELLO.size
REPLY_BYTES = _REPLY.size
MESSAGE_BYTES = _MESSAGE.size
MAX_HOST_BYTES = 255

FRAME = b"kvlframe"
PROBE = b"kvlprobe"
CREDIT = b"kvlcredt"


@dataclass(frozen=True, slots=True)
class Offer:
    """What the landing side asks for."""

    geometry: RingGeometry
    challenge: bytes

    def pack(self) -> bytes:
        """The opaque bytes of `Landing.offer`."""
        return _OFFER.pack(b"kvlo", VERSION, self.geometry.slot_bytes, self.geometry.num_slots, self.challenge)


@dataclass(frozen=True, slots=True)
class Answer:
    """Where the departure side listens, and for which token."""

    host: str
    port: int
    token: bytes

    def pack(self) -> bytes:
        """The opaque bytes that `Landing.establish` takes."""
        return _ANSWER.pack(b"kvla", VERSION, self.port, self.token) + self.host.encode()


@dataclass(frozen=True, slots=True)
class Hello:
    """The landing side's first bytes on the connection."""

    geometry: RingGeometry
    token: bytes
    proof: bytes

    def pack(self) -> bytes:
        """`HELLO_BYTES` bytes."""
        geometry = self.geometry
        return _HELLO.pack(b"kvlh", VERSION, geometry.slot_bytes, geometry.num_slots, self.token, self.proof)


@dataclass(frozen=True, slots=True)
class Message:
    """The fixed part of everything that crosses an open channel."""

    kind: bytes
    num_bytes: int
    number: int

    def pack(self) -> bytes:
        """`MESSAGE_BYTES` bytes."""
        return _MESSAGE.pack(self.kind, self.num_bytes, self.number)


def unpack_offer(data: bytes) -> Offer | str:
    """Read an offer; a text says why it is none."""
    if len(data) != _OFFER.size:
        return f"an offer has {_OFFER.size} bytes, this one {len(data)}"
    magic, version, slot_bytes, num_slots, challenge = _OFFER.unpack(data)
    fault = _check_start("an offer", magic, b"kvlo", version)
    geometry = _geometry(slot_bytes, num_slots)
    return fault or (geometry if isinstance(geometry, str) else Offer(geometry, challenge))


def unpack_answer(data: bytes) -> Answer | str:
    """Read an answer; a text says why it is none."""
    if not _ANSWER.size < len(data) <= _ANSWER.size + MAX_HOST_BYTES:
        return f"an answer of {len(data)} bytes"
    magic, version, port, token = _ANSWER.unpack_from(data)
    try:
        host = data[_ANSWER.size :].decode("ascii")
    except UnicodeDecodeError:
        return "the host in the answer is not ASCII"
    if not host.isprintable():
        return f"{host!r} is no host"
    return _check_start("an answer", magic, b"kvla", version) or Answer(host, port, token)


def unpack_hello(data: bytes | bytearray) -> Hello | str:
    """Read a hello of `HELLO_BYTES`; a text says why it is none. The proof is not checked here."""
    magic, version, slot_bytes, num_slots, token, proof = _HELLO.unpack(data)
    fault = _check_start("a hello", magic, b"kvlh", version)
    geometry = _geometry(slot_bytes, num_slots)
    return fault or (geometry if isinstance(geometry, str) else Hello(geometry, token, proof))


def pack_reply(proof: bytes) -> bytes:
    """The departure side's first `REPLY_BYTES` on the connection."""
    return _REPLY.pack(b"kvlr", VERSION, proof)


def unpack_reply(data: bytes) -> bytes | str:
    """The proof in a reply of `REPLY_BYTES`; a text says why it is none."""
    magic, version, proof = _REPLY.unpack(data)
    return _check_start("a reply", magic, b"kvlr", version) or bytes(proof)


def unpack_message(data: memoryview) -> Message:
    """Read the fixed part of a message (`MESSAGE_BYTES`); any bytes give one, the caller checks every field."""
    return Message(*_MESSAGE.unpack(data))


def prove(secret: bytes, role: bytes, token: bytes, challenge: bytes, geometry: RingGeometry) -> bytes:
    """Proof that `role` (`landing` or `departure`) knows the cluster's secret, for this one channel."""
    stated = _GEOMETRY.pack(VERSION, geometry.slot_bytes, geometry.num_slots)
    return hmac.digest(secret, role + b"\0" + token + challenge + stated, "sha256")


def _check_start(what: str, magic: bytes, wanted: bytes, version: int) -> str | None:
    if magic != wanted:
        return f"{what} begins with {wanted!r}, this one with {magic!r}"
    if version != VERSION:
        return f"{what} of version {version}, this side speaks version {VERSION}"
    return None


def _geometry(slot_bytes: int, num_slots: int) -> RingGeometry | str:
    try:
        return RingGeometry(slot_bytes, num_slots)
    except ValueError as error:
        return str(error)
