"""What a transfer measurement is asked to do, and the shape of the blocks it moves.

Never: opens anything; needs nothing but the standard library.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from random import Random

from transport.contract import RingGeometry

TOKENS_PER_BLOCK = 16
MAX_BLOCKS = 1024
VALUE_BYTES = 4  # float32
SEAL_BYTES = 256  # of kvlease.kvcache.seal, which a machine without xxhash cannot import; a test compares the two
ALIGNMENT = 64
ORDERS = ("consecutive", "random")


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block of `TOKENS_PER_BLOCK` tokens of ordinary attention: one key and one value array in each layer."""

    num_bytes: int
    num_layers: int

    def __post_init__(self) -> None:
        """Refuse a size that is no whole number of aligned arrays."""
        if self.num_layers < 1 or self.num_bytes < 1 or self.num_bytes % (self.num_arrays * ALIGNMENT):
            raise ValueError(
                f"a block of {self.num_bytes} bytes is not made of {self.num_arrays} arrays of a multiple of 64 bytes"
            )

    @property
    def num_arrays(self) -> int:
        """Keys and values of each layer."""
        return 2 * self.num_layers

    @property
    def width(self) -> int:
        """Values of one token in one array."""
        return self.num_bytes // (self.num_arrays * TOKENS_PER_BLOCK * VALUE_BYTES)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Sizes in bytes. `busy_model`: a folder, or `tiny`, that decodes 8 streams in the receiving process; empty: none."""

    transport: str = "tcp"
    host: str = "127.0.0.1"
    block_bytes: tuple[int, ...] = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
    total_bytes: int = 64 << 20
    ring_bytes: int = 32 << 20
    rounds: int = 7
    num_latencies: int = 200
    num_layers: int = 4
    is_verified: bool = True
    busy_model: str = ""

    def __post_init__(self) -> None:
        """Refuse what could not be measured."""
        if min(self.rounds, self.num_layers, *self.block_bytes) < 1 or self.num_latencies < 0:
            raise ValueError(f"rounds, layers and block sizes are positive, got {self}")
        if self.total_bytes < max(self.block_bytes):
            raise ValueError(f"{self.total_bytes} bytes in all hold no block of {max(self.block_bytes)}")
        for num_bytes in self.block_bytes:
            self.shape(num_bytes)

    @property
    def num_steps(self) -> int:
        """Rounds of all block sizes, warm-ups included."""
        return (self.rounds + 1) * len(self.block_bytes) * (2 if self.busy_model else 1)

    def shape(self, block_bytes: int) -> BlockShape:
        """Of the blocks of this size."""
        return BlockShape(block_bytes, self.num_layers)

    def num_blocks(self, block_bytes: int) -> int:
        """Blocks of one transfer: as many as `total_bytes` holds, and no more than a prompt that is quickly prepared."""
        return min(self.total_bytes // block_bytes, MAX_BLOCKS)

    def num_single(self, block_bytes: int) -> int:
        """Blocks that are sent one by one: no more than a transfer has."""
        return min(self.num_latencies, self.num_blocks(block_bytes))

    def geometry(self, block_bytes: int, *, is_sealed: bool) -> RingGeometry:
        """Of both rings: as many blocks as the ring's bytes hold, at least two."""
        slot_bytes = block_bytes + (SEAL_BYTES if is_sealed else 0)
        return RingGeometry(slot_bytes, max(2, self.ring_bytes // slot_bytes))


def order_of(num_blocks: int, order: str, seed: int) -> list[int]:
    """Which block comes when."""
    indices = list(range(num_blocks))
    if order == "random":
        Random(seed).shuffle(indices)  # noqa: S311  a seed that gives the same order again
    return indices


def cpu_s() -> float:
    """Processor time of this process so far, all threads, user and system (s)."""
    times = resource.getrusage(resource.RUSAGE_SELF)
    return times.ru_utime + times.ru_stime
