"""The seal: 256 bytes in front of a canonical block that say what it is and prove it.

    0       8         10          12     16      32      48         56          60     64
    | magic | version | algorithm | zero | lease | nonce | position | num_valid | zero |
    64            80      96       112    240   256
    | fingerprint | chain | digest | zero | tag |

All numbers are little-endian. The tag is BLAKE2b keyed by the nonce, over everything before it. The digest is XXH3-128
over the whole canonical block, slots beyond the valid tokens and gaps counted as zero. Together they say: a holder of
this nonce sealed these bytes for this position. That is no signature; whoever holds the nonce can seal.

Never: raises on foreign bytes, or looks at the content.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvlease.kvcache.layout import FINGERPRINT_BYTES, Layout

SEAL_BYTES = 256
SEAL_VERSION = 1
ALGORITHM_XXH3_128 = 1
IDENTITY_BYTES = 16
DIGEST_BYTES = 16

_MAGIC = b"KVLSEAL\x00"
_TAG_BYTES = 16
_BODY = struct.Struct("<8sHH4x16s16sQI4x16s16s16s128x")
_LEASE = slice(16, 32)
_SIGNED_BYTES = SEAL_BYTES - _TAG_BYTES
assert _BODY.size == _SIGNED_BYTES, "the table above is what the code packs"


@dataclass(frozen=True, slots=True)
class SealFault:
    """Bytes that are no seal of ours: the check that failed, and what was found."""

    check: str
    message: str


@dataclass(frozen=True, slots=True)
class Seal:
    """What a sealed block claims. `num_valid` tokens from the start of wire block `position` are in it."""

    lease_id: bytes
    nonce: bytes
    position: int
    num_valid: int
    fingerprint: bytes
    chain: bytes
    digest: bytes

    def __post_init__(self) -> None:
        """Refuse fields that do not fit the header. Any header with the right tag fits."""
        fields = (self.lease_id, self.nonce, self.fingerprint, self.chain, self.digest)
        if [len(field) for field in fields] != [IDENTITY_BYTES] * 2 + [FINGERPRINT_BYTES] + [DIGEST_BYTES] * 2:
            raise ValueError("lease, nonce, fingerprint, chain and digest of a seal are 16 bytes each")
        if not (0 <= self.position < 2**64 and 0 <= self.num_valid < 2**32):
            raise ValueError(f"position {self.position} or valid tokens {self.num_valid} do not fit a seal")

    def pack(self) -> bytes:
        """The 256 bytes of the header."""
        body = _BODY.pack(
            _MAGIC,
            SEAL_VERSION,
            ALGORITHM_XXH3_128,
            self.lease_id,
            self.nonce,
            self.position,
            self.num_valid,
            self.fingerprint,
            self.chain,
            self.digest,
        )
        return body + _tag(body, self.nonce)

    @staticmethod
    def unpack(data: bytes | bytearray | memoryview) -> Seal | SealFault:
        """Read a header from the first 256 bytes, copied once; checks magic, version, algorithm, tag, in this order."""
        header = bytes(data[:SEAL_BYTES])
        if len(header) != SEAL_BYTES:
            return SealFault("length", f"a seal has {SEAL_BYTES} bytes, found {len(header)}")
        body = header[:_SIGNED_BYTES]
        magic, version, algorithm, lease_id, nonce, position, num_valid, fingerprint, chain, digest = _BODY.unpack(body)
        if magic != _MAGIC:
            return SealFault("magic", "no seal stands in front of the block")
        if version != SEAL_VERSION:
            return SealFault("version", f"seal version {version}, this side speaks {SEAL_VERSION}")
        if algorithm != ALGORITHM_XXH3_128:
            return SealFault("algorithm", f"digest algorithm {algorithm}, this side knows {ALGORITHM_XXH3_128}")
        if not hmac.compare_digest(_tag(body, nonce), header[_SIGNED_BYTES:]):
            return SealFault("tag", "the tag does not belong to this header")
        return Seal(lease_id, nonce, position, num_valid, fingerprint, chain, digest)


def claimed_lease(data: bytes | bytearray | memoryview) -> bytes | None:
    """The lease that a block claims to belong to, for finding who can judge it. `None`: it is no seal at all."""
    header = bytes(data[:SEAL_BYTES])
    return header[_LEASE] if len(header) == SEAL_BYTES and header.startswith(_MAGIC) else None


def chain_hashes(token_ids: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """A 16-byte hash for each block, over all tokens from the first one to the block's end."""
    assert block_size > 0, f"blocks of {block_size} tokens"
    running = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"kvlease-chain")
    chains = []
    for first in range(0, len(token_ids), block_size):
        tokens = token_ids[first : first + block_size]
        running.update(struct.pack(f"<{len(tokens)}I", *tokens))
        chains.append(running.copy().digest())
    return tuple(chains)


def sealed_block_bytes(layout: Layout, block_size: int) -> int:
    """Bytes of a sealed block of `block_size` tokens: what a ring slot must hold, a multiple of 64."""
    return SEAL_BYTES + layout.content_bytes(block_size)


def _tag(body: bytes, nonce: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_TAG_BYTES, key=nonce, person=b"kvlease-seal").digest()
