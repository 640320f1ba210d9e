"""What a server says of itself when asked.

Never: says anything of a prompt or of a tenant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvlease.kvcache.pool import PoolCounts
from kvlease.v1 import kvlease_pb2 as pb


@dataclass(frozen=True, slots=True)
class PairReport:
    """One pair, as one of its ends sees it. `state`: connecting, ready, stalled or refused."""

    peer_address: str
    transport: str
    state: str
    detail: str = ""
    epoch: int = 0
    num_blocks: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ServerReport:
    """One server."""

    role: str
    address: str
    incarnation: bytes
    model: str
    dtype: str
    block_size: int
    blocks: PoolCounts
    num_queued: int
    num_running: int
    max_model_len: int
    pairs: Sequence[PairReport] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    transport: str = ""  # which carries the blocks, and how it was chosen


def encode_report(report: ServerReport) -> pb.ServerStatus:
    """For the Status method of both servers."""
    pairs = [
        pb.PairStatus(
            peer_address=pair.peer_address,
            transport=pair.transport,
            epoch=pair.epoch,
            state=pair.state,
            detail=pair.detail,
            num_blocks=pair.num_blocks,
            num_bytes=pair.num_bytes,
        )
        for pair in report.pairs
    ]
    return pb.ServerStatus(
        role=report.role,
        address=report.address,
        incarnation=report.incarnation,
        model=report.model,
        dtype=report.dtype,
        block_size=report.block_size,
        blocks_free=report.blocks.free,
        blocks_reserved=report.blocks.reserved,
        blocks_filling=report.blocks.filling,
        blocks_readable=report.blocks.readable,
        blocks_total=report.blocks.total,
        num_queued=report.num_queued,
        num_running=report.num_running,
        max_model_len=report.max_model_len,
        pairs=pairs,
        counters=dict(report.counters),
        transport=report.transport,
    )
