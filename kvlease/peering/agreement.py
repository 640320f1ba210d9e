"""What two servers must agree on before any traffic, and the refusal that names both sides where they do not.

Never: pairs servers that could misread each other's blocks, or that cannot hold the context they advertise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvlease.engine.runner import ModelRunner
from kvlease.handoff.limits import PROTOCOL_VERSION
from kvlease.handoff.messages import IDENTITY_BYTES, Incarnation
from kvlease.kvcache.limits import DEFAULT_LIMITS as KV_LIMITS
from kvlease.kvcache.seal import SEAL_VERSION, sealed_block_bytes
from kvlease.peering.identity import draw_incarnation
from kvlease.peering.limits import Limits
from kvlease.v1 import kvlease_pb2 as pb
from transport.contract import RingGeometry


@dataclass(frozen=True, slots=True)
class Party:
    """One server as its peers must know it. Tokens where not said otherwise; `max_model_len` 0: whatever fits."""

    address: str
    incarnation: Incarnation
    fingerprint: bytes
    layout: str
    pool_tokens: int
    context_length: int
    max_model_len: int
    block_size: int
    ring_bytes: int
    sealed_block_bytes: int
    transport: str

    @property
    def capacity(self) -> int:
        """The longest context that this server can hold."""
        return min(self.pool_tokens, self.max_model_len or self.context_length)

    @property
    def geometry(self) -> RingGeometry:
        """Of the landing ring that this server, as the receiver, offers to each peer."""
        return RingGeometry(self.sealed_block_bytes, max(2, self.ring_bytes // self.sealed_block_bytes))


class PartySettings(Protocol):
    """What peers must know of a server's configuration."""

    @property
    def max_model_len(self) -> int:
        """Tokens; 0: whatever fits."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def ring_bytes(self) -> int:
        """Of the ring of one pair."""
        ...


def party_of(settings: PartySettings, runner: ModelRunner, address: str, transport: str) -> Party:
    """This process, as its peers must know it; its incarnation is drawn here, once."""
    return Party(
        address,
        draw_incarnation(),
        runner.layout.fingerprint(runner.facts.fingerprint),
        runner.layout.describe(),
        runner.storage.num_blocks * settings.block_size,
        runner.facts.context_length,
        settings.max_model_len,
        settings.block_size,
        settings.ring_bytes,
        sealed_block_bytes(runner.layout, settings.block_size),
        transport,
    )


def hello_of(party: Party, offer: bytes) -> pb.PairHello:
    """Decode's first message of a pair; blocks are sealed in the receiver's block size."""
    return pb.PairHello(
        protocol_version=PROTOCOL_VERSION,
        seal_version=SEAL_VERSION,
        address=party.address,
        incarnation=party.incarnation,
        fingerprint=party.fingerprint,
        layout=party.layout,
        pool_tokens=party.pool_tokens,
        max_model_len=party.max_model_len,
        transport=party.transport,
        offer=offer,
        ring_bytes=party.geometry.ring_bytes,
        block_size=party.block_size,
    )


def malformed(hello: pb.PairHello, own: Party, limits: Limits) -> str | None:
    """What makes no sense in a hello, whoever it is from, or None. Nothing else may look at one that is malformed."""
    texts = (
        ("address", hello.address, limits.address_chars),
        ("transport", hello.transport, limits.address_chars),
        ("layout", hello.layout, limits.layout_chars),
    )
    for what, text, max_chars in texts:
        if not 0 < len(text) <= max_chars or not text.isprintable():
            return f"the hello's {what} is empty, longer than {max_chars} characters, or not printable"
    for what, name in (("incarnation", hello.incarnation), ("fingerprint", hello.fingerprint)):
        if len(name) != IDENTITY_BYTES:
            return f"the hello's {what} has {len(name)} bytes, {IDENTITY_BYTES} are needed"
    if len(hello.offer) > limits.offer_bytes:
        return f"the hello's offer has {len(hello.offer)} bytes, at most {limits.offer_bytes} are read"
    most = min(own.pool_tokens, KV_LIMITS.max_block_size)
    if not 0 < hello.block_size <= most:
        return f"decode seals blocks of {hello.block_size} tokens, prefill sends 1 to {most}"
    if hello.pool_tokens < hello.block_size:
        return f"decode's pool of {hello.pool_tokens} tokens holds no block of {hello.block_size}"
    return None


def disagreement(hello: pb.PairHello, own: Party, sealed_block_bytes: int) -> str | None:
    """Why this prefill server does not pair with the decode server of the hello, or None. Names both values."""
    pairs = (
        ("protocol version", hello.protocol_version, PROTOCOL_VERSION, "run one release everywhere"),
        ("seal version", hello.seal_version, SEAL_VERSION, "run one release everywhere"),
        ("transport", hello.transport, own.transport, "start both with the same --transport"),
    )
    for what, theirs, ours, advice in pairs:
        if theirs != ours:
            return f"{what}: decode has {theirs}, prefill {ours}; {advice}"
    if hello.fingerprint != own.fingerprint:
        same = (
            "the same layout, other weights"
            if hello.layout == own.layout
            else f"decode {hello.layout}, prefill {own.layout}"
        )
        return f"model or dtype: {same}; start both with the same --model and --dtype"
    wanted = max(hello.max_model_len, own.max_model_len)
    smallest = min(hello.pool_tokens, own.pool_tokens)
    if wanted > smallest:
        return (
            f"--max-model-len {wanted} does not fit the pools: decode holds {hello.pool_tokens} tokens, "
            f"prefill {own.pool_tokens}; give more blocks or a smaller --max-model-len"
        )
    ring_limit = max(own.ring_bytes, 2 * sealed_block_bytes)
    if hello.ring_bytes < sealed_block_bytes:
        return f"decode wants a ring of {hello.ring_bytes} bytes, but a sealed block has {sealed_block_bytes}"
    if hello.ring_bytes > ring_limit:
        return f"decode wants a ring of {hello.ring_bytes} bytes, prefill allows {ring_limit}; use one --ring-bytes"
    return None


def unfit(answer: pb.PairAnswer, own: Party) -> str | None:
    """Why this decode server cannot take prefill's answer, or None. A pair that could serve nothing is none."""
    if len(answer.incarnation) != IDENTITY_BYTES:
        return f"prefill's incarnation has {len(answer.incarnation)} bytes, {IDENTITY_BYTES} are needed"
    theirs = (answer.block_size, answer.slot_bytes, answer.num_slots)
    ours = (own.block_size, own.geometry.slot_bytes, own.geometry.num_slots)
    if theirs != ours:
        return f"block size, slot bytes and slots: decode offered {ours}, prefill answered {theirs}"
    if not answer.epoch or not answer.max_model_len:
        return f"prefill answered with epoch {answer.epoch} and a context of {answer.max_model_len} tokens"
    return None
