"""The promises, judged from outside after each event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlease.handoff.messages import Aborted, AbortReason, Finished, Rejected, RejectReason, Verdict
from kvlease.kvcache.seal import SEAL_BYTES, Seal
from tests.explorer.ghost import BLOCK_SIZE, SLOT_BYTES, V_OFFSET, ZERO, require, truth

if TYPE_CHECKING:
    from tests.explorer.decode_server_side import DecodeServer
    from tests.explorer.prefill_side import PrefillServer

_NEVER_BETWEEN_HONEST_SERVERS = (AbortReason.PROTOCOL_ERROR, AbortReason.MANIFEST_MISMATCH)


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
        require(
            end.reason not in _NEVER_BETWEEN_HONEST_SERVERS, "P2", f"two honest servers end request {index} by {end}"
        )
    if not is_hurt and not isinstance(end, Finished):
        sized = isinstance(end, Rejected) and end.reason in (RejectReason.PROMPT_TOO_LONG, RejectReason.OUTPUT_TOO_LONG)
        require(sized, "P10", f"nothing was done to request {index}, yet it ends by {end}")


def judge_rest(decode: DecodeServer, prefill: PrefillServer) -> None:
    """Nothing can happen any more; both are as the state has them."""
    for index, request in enumerate(decode.requests):
        require(request.stage == "ended", "P6", f"request {index} never ends: it is {request.stage}, {request.attempt}")
    for pool, where in ((decode.pool, "decode"), (prefill.pool, "prefill")):
        counts = pool.counts()
        require(counts.free == counts.total, "P6", f"all is over and {where} has {counts}")
    residue = len(decode.dock._book), len(decode.dock._berths), len(decode.memory._queue), len(decode.batch)
    require(not any(residue), "P6", f"decode keeps leases, berths, tickets or sequences: {residue}")
    left = prefill.queue.num_waiting + prefill.queue.num_begun + sum(len(line._prompts) for line in prefill.lines)
    require(not left, "P6", f"prefill keeps {left} places of prompts that have ended")
