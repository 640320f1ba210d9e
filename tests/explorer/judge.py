"""The promises, judged from outside after each event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlease.handoff.messages import Aborted, AbortReason, Finished, Rejected, RejectReason, Verdict
from kvlease.kvcache.memory import Room
from kvlease.kvcache.pool import BlockPool
from kvlease.kvcache.seal import SEAL_BYTES, Seal
from tests.explorer.ghost import (
    BLOCK_SIZE,
    SLOT_BYTES,
    V_OFFSET,
    ZERO,
    GhostLedger,
    GhostStorage,
    request_of,
    require,
    truth,
)

if TYPE_CHECKING:
    from tests.explorer.world import World

_NEVER_BETWEEN_HONEST_SERVERS = (AbortReason.PROTOCOL_ERROR, AbortReason.MANIFEST_MISMATCH)


def judge_world(world: World) -> None:
    """Everything that must hold in every state."""
    for side, where in ((world.d, "decode"), (world.p, "prefill")):
        rooms, at_work = side.rooms(), side.rooms_at_work()
        _judge_pool(side.kv.pool, rooms, at_work, where)
        _judge_claims(side.ledger, side.storage, where)


def _judge_pool(pool: BlockPool, rooms: list[tuple[int, Room]], at_work: list[tuple[int, Room]], where: str) -> None:
    pool.check()
    held: dict[int, int] = {}
    for request, room in rooms:
        for block in room.table:
            require(held.setdefault(block, request) == request, "P8", f"two requests hold block {block} at {where}")
    for request, room in at_work:
        for block in room.table:
            other = held.setdefault(block, request)
            require(other == request, "P1", f"a thread of {where} works on block {block} that request {other} has now")
    counts = pool.counts()
    require(counts.free == counts.total - len(held), "P5", f"{where} has {counts}, but only {sorted(held)} are in use")


def _judge_claims(ledger: GhostLedger, storage: GhostStorage, where: str) -> None:
    """What a ledger calls proven is what that request's KV is."""
    for slot, sequence, position in ledger.claims():
        found, request = storage.slot(slot), request_of(sequence)
        right = found == truth(request, position)
        require(right, "P1", f"{where} calls {found} readable as position {position} of request {request}")


def judge_frame(frame: bytes, request: int, num_tokens: int) -> None:
    """What leaves under a good seal is computed, and this request's."""
    seal = Seal.unpack(frame)
    assert isinstance(seal, Seal), seal
    for offset in range(BLOCK_SIZE):
        position = seal.position * BLOCK_SIZE + offset
        k, v = SEAL_BYTES + offset * SLOT_BYTES, SEAL_BYTES + V_OFFSET + offset * SLOT_BYTES
        found = frame[k : k + SLOT_BYTES], frame[v : v + SLOT_BYTES]
        right = truth(request, position) if position < num_tokens else (ZERO, ZERO)
        require(found == right, "P11", f"{found} was sealed as position {position} of request {request}")


def judge_end(index: int, end: object, verdict: Verdict | None, *, is_hurt: bool) -> None:
    """The one terminal event: the verdict as it was made, or the text, or the end that something brought upon it."""
    if isinstance(end, Rejected) and end.reason is not RejectReason.NO_PREFILL:
        require(end == verdict, "P2", f"request {index} hears {end}, the verdict was {verdict}")
    if isinstance(end, Aborted):
        require(end.reason not in _NEVER_BETWEEN_HONEST_SERVERS, "P2", f"two honest servers end request {index} by {end}")
    if not is_hurt and not isinstance(end, Finished):
        sized = isinstance(end, Rejected) and end.reason in (RejectReason.PROMPT_TOO_LONG, RejectReason.OUTPUT_TOO_LONG)
        require(sized, "P10", f"nothing was done to request {index}, yet it ends by {end}")


def judge_rest(world: World) -> None:
    """Nothing can happen any more."""
    for index, request in enumerate(world.d.requests):
        require(request.stage == "ended", "P6", f"request {index} never ends: it is {request.stage}, {request.attempt}")
    for side, where in ((world.d, "decode"), (world.p, "prefill")):
        counts = side.kv.counts()
        require(counts.free == counts.total, "P6", f"all is over and {where} has {counts}")
    residue = len(world.d.dock._book), len(world.d.dock._berths), len(world.d.memory._queue), len(world.d.batch)
    require(not any(residue), "P6", f"decode keeps leases, berths, tickets or sequences: {residue}")
    left = world.p.queue.num_waiting + world.p.queue.num_begun + sum(len(line._prompts) for line in world.p.lines)
    require(not left, "P6", f"prefill keeps {left} places of prompts that have ended")
