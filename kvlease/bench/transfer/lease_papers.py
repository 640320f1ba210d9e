"""What both sides of a sealed transfer must agree on: the lease's identities, and the tokens that its blocks are sealed for.

Never: seals or verifies; the shipped code does.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from kvlease.bench.transfer.plan import TOKENS_PER_BLOCK, VALUE_BYTES, BlockShape
from kvlease.handoff.messages import Epoch, Grant, LeaseId, Nonce
from kvlease.kvcache.layout import Layout, attention_layout

VOCAB_SIZE = 128
FINGERPRINT = bytes(16)
EPOCH = Epoch(1)


@dataclass(frozen=True, slots=True)
class LeasePapers:
    """Of one transfer, as 64 characters of hex between the two sides."""

    lease_id: bytes
    nonce: bytes

    @classmethod
    def draw(cls) -> LeasePapers:
        """New ones."""
        return cls(secrets.token_bytes(16), secrets.token_bytes(16))

    @classmethod
    def read(cls, text: str) -> LeasePapers:
        """As `text` wrote them."""
        data = bytes.fromhex(text)
        return cls(data[:16], data[16:])

    @property
    def text(self) -> str:
        """For the other side."""
        return (self.lease_id + self.nonce).hex()

    @property
    def grant(self) -> Grant:
        """As the handoff has it."""
        return Grant(LeaseId(self.lease_id), Nonce(self.nonce), EPOCH)


def layout_of(shape: BlockShape) -> Layout:
    """A layout whose block of `TOKENS_PER_BLOCK` tokens is of this shape."""
    layout = attention_layout(shape.num_layers, 1, shape.width, "float32")
    assert layout.content_bytes(TOKENS_PER_BLOCK) == shape.num_bytes, f"{shape} is not {layout.describe()}"
    assert layout.layers[0][0].token_bytes == shape.width * VALUE_BYTES
    return layout


def prompt_of(num_blocks: int) -> tuple[int, ...]:
    """The tokens of so many whole blocks."""
    return tuple(number % VOCAB_SIZE for number in range(num_blocks * TOKENS_PER_BLOCK))
