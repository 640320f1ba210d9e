"""The one door into a private pool: out of a landing ring, copied, then the copy verified, then recorded as readable.

    landing ring          private memory of this function, then of the sequence
    | seal    | ──copy──▶ header ──▶ every decision is made from this copy
    | content | ──copy──▶ slots of the sequence's table, unproven ──digest──▶ equal to the seal's? proven : refused

Whoever writes into the ring at whatever moment can have a block refused. What becomes readable has been hashed where
it lies, and lies where no peer can write.

Never: decides from a byte that a peer could still change, writes outside the table, or over anything that is proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlease.kvcache.canonical import copy_in, slot_runs
from kvlease.kvcache.layout import check_block_size
from kvlease.kvcache.ledger import Occupancy, SlotLedger
from kvlease.kvcache.seal import DIGEST_BYTES, IDENTITY_BYTES, SEAL_BYTES, Seal, SealFault, claimed_lease
from kvlease.kvcache.sizing import blocks_for
from kvlease.kvcache.storage import KVStorage


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the receiving side knows itself of the blocks it granted: nothing in it comes from the sender."""

    lease_id: bytes
    nonce: bytes
    fingerprint: bytes
    chains: tuple[bytes, ...]
    num_tokens: int
    wire_block_size: int

    def __post_init__(self) -> None:
        """Refuse an expectation that no block could meet."""
        check_block_size(self.wire_block_size)
        if not len(self.lease_id) == len(self.nonce) == len(self.fingerprint) == IDENTITY_BYTES:
            raise ValueError(f"lease, nonce and fingerprint are {IDENTITY_BYTES} bytes each")
        if self.num_tokens < 1 or len(self.chains) != blocks_for(self.num_tokens, self.wire_block_size):
            raise ValueError(
                f"{self.num_tokens} tokens do not make {len(self.chains)} blocks of {self.wire_block_size}"
            )
        if any(len(chain) != DIGEST_BYTES for chain in self.chains):
            raise ValueError(f"a chain hash is {DIGEST_BYTES} bytes")

    def num_valid(self, position: int) -> int:
        """Tokens of wire block `position`."""
        return min(self.wire_block_size, self.num_tokens - position * self.wire_block_size)


@dataclass(frozen=True, slots=True)
class Landed:
    """Wire block `position` is readable for its sequence: `num_valid` tokens of it."""

    position: int
    num_valid: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A block that did not become readable: the check that failed, and what was found. Its lease is spoiled."""

    check: str
    message: str


def peek_lease(slot: memoryview) -> bytes | None:
    """The lease that an arrived block claims, for finding its sequence; unverified. `None`: it is no sealed block."""
    return claimed_lease(slot)


def land_block(
    storage: KVStorage,
    ledger: SlotLedger,
    sequence_id: int,
    table: Sequence[int],
    expectation: Expectation,
    slot: memoryview,
) -> Landed | Refused:
    """Judge one sealed block, exactly as long as it arrived, and copy it to the sequence's blocks.

    `table` must have room for the whole prompt. After a refusal no slot is readable that was not before.
    """
    assert (storage.num_blocks, storage.block_size) == (ledger.num_blocks, ledger.block_size), "another pool's ledger"
    room = len(table) * storage.block_size
    assert expectation.num_tokens <= room, f"{expectation.num_tokens} tokens are expected in a table for {room}"
    plan = storage.plan(expectation.wire_block_size)
    if len(slot) != SEAL_BYTES + plan.content_bytes:
        return Refused("length", f"{len(slot)} bytes arrived, a sealed block has {SEAL_BYTES + plan.content_bytes}")
    seal = Seal.unpack(slot)
    if isinstance(seal, SealFault):
        return Refused(seal.check, seal.message)
    refusal = _objection(seal, expectation)
    if refusal is not None:
        return refusal
    first_position = seal.position * expectation.wire_block_size
    extent = (first_position, seal.num_valid)
    occupancy = ledger.occupancy(sequence_id, table, *extent)
    assert occupancy is not Occupancy.FOREIGN, f"the table {tuple(table)} leads to what is proven for another"
    if occupancy is Occupancy.OWN:
        return Refused("duplicate", f"block {seal.position} has landed before")
    runs = slot_runs(table, storage.block_size, *extent)
    window = storage.write_window(runs)
    ledger.begin_write(*ledger.locate(table, *extent))
    digest = copy_in(plan, window, slot[SEAL_BYTES:])
    if digest != seal.digest:
        found = "its padding is not zero" if digest is None else "its bytes are not those that were sealed"
        return Refused("digest", f"block {seal.position}: {found}")
    storage.settle(window, runs)
    ledger.record_verified(sequence_id, table, *extent)
    return Landed(seal.position, seal.num_valid)


def _objection(seal: Seal, expectation: Expectation) -> Refused | None:
    """Compare what a seal claims with what is known here. The nonce appears in no message: who holds it can seal."""
    identities = (
        ("lease", seal.lease_id, expectation.lease_id, "another lease"),
        ("nonce", seal.nonce, expectation.nonce, "another nonce than this lease's"),
        ("fingerprint", seal.fingerprint, expectation.fingerprint, "another model or layout"),
    )
    for check, found, known, what in identities:
        if found != known:
            return Refused(check, f"block {seal.position} was sealed for {what}")
    if seal.position >= len(expectation.chains):
        return Refused("position", f"block {seal.position} of a prompt of {len(expectation.chains)} blocks")
    num_valid = expectation.num_valid(seal.position)
    if seal.num_valid != num_valid:
        return Refused(
            "valid_tokens", f"block {seal.position} claims {seal.num_valid} tokens, it must have {num_valid}"
        )
    if seal.chain != expectation.chains[seal.position]:
        return Refused("chain", f"block {seal.position} was made from other tokens than the prompt's")
    return None
