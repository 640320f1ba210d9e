"""Copying computed blocks into the departure ring, behind their seals.

    private blocks ──copy, digest──▶ ring slot: | seal | content |
    the engine's, pinned             ours until it is sent

Never: seals a token that this engine's forward pass has not computed, or reads the departure ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlease.kvcache.canonical import copy_out, slot_runs
from kvlease.kvcache.layout import check_block_size
from kvlease.kvcache.ledger import ComputedBlocks
from kvlease.kvcache.seal import SEAL_BYTES, Seal
from kvlease.kvcache.storage import KVStorage


@dataclass(frozen=True, slots=True)
class DepartureLease:
    """What the sealer needs of a lease. `chains`: one hash for each wire block of the prompt, see `chain_hashes`."""

    lease_id: bytes
    nonce: bytes
    fingerprint: bytes
    chains: tuple[bytes, ...]
    wire_block_size: int

    def __post_init__(self) -> None:
        """Refuse a lease that could not be sealed for."""
        check_block_size(self.wire_block_size)
        if not self.chains:
            raise ValueError("a lease covers at least one block")


def seal_block(
    storage: KVStorage, computed: ComputedBlocks, lease: DepartureLease, position: int, target: memoryview
) -> int:
    """Write wire block `position` and its seal to `target`; returns the bytes written, all of them to be sent.

    Every block but the prompt's last must be computed to its end. Raises `UnprovenSlot` if the blocks were taken away
    from the sequence before the copy was complete: then there is no seal in `target`, and it must not be sent.
    """
    plan = storage.plan(lease.wire_block_size)
    num_bytes = SEAL_BYTES + plan.content_bytes
    assert len(target) >= num_bytes, f"a slot of {len(target)} bytes for a sealed block of {num_bytes}"
    first_position, num_valid = _extent(computed, lease, position)
    target[:SEAL_BYTES] = bytes(SEAL_BYTES)  # what an earlier block left here must not stand before this content
    computed.confirm(first_position, num_valid)
    runs = slot_runs(computed.table, storage.block_size, first_position, num_valid)
    digest = copy_out(plan, storage.read_window(runs), target[SEAL_BYTES:num_bytes])
    computed.confirm(first_position, num_valid)  # again: they might have been freed and filled anew during the copy
    seal = Seal(lease.lease_id, lease.nonce, position, num_valid, lease.fingerprint, lease.chains[position], digest)
    target[:SEAL_BYTES] = seal.pack()
    return num_bytes


def _extent(computed: ComputedBlocks, lease: DepartureLease, position: int) -> tuple[int, int]:
    """First position and number of tokens of wire block `position`."""
    assert 0 <= position < len(lease.chains), f"block {position} of a prompt of {len(lease.chains)} blocks"
    first_position = position * lease.wire_block_size
    num_valid = min(lease.wire_block_size, computed.num_tokens - first_position)
    is_last = position == len(lease.chains) - 1
    assert num_valid > 0, f"block {position} begins at {first_position}, computed are {computed.num_tokens} tokens"
    assert is_last or num_valid == lease.wire_block_size, f"block {position} is computed only to {computed.num_tokens}"
    return first_position, num_valid
