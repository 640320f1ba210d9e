"""One attempt, performed: feeds `decode_step` with what happens and does what it says.

Never: decides; or leaves a lease, a room or a stream behind, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

from decode_server.landing import Berth
from decode_server.memory import DecodeMemory, Rooms
from decode_server.peers import Peer
from kvlease.engine.work_thread import WorkThread
from kvlease.handoff.decode_attempt import (
    AskRoom,
    Committed,
    Conclude,
    DecodeAction,
    DecodeAttempt,
    DecodeHappening,
    Ended,
    FirstToken,
    OpenLease,
    RoomReserved,
    SendUp,
    decode_step,
)
from kvlease.handoff.lease_book import Lease
from kvlease.handoff.limits import Limits
from kvlease.handoff.messages import Aborted, AbortReason, Complete, Proposal, Rejected
from kvlease.handoff.tables import DecodeState
from kvlease.handoff.verdicts import aborted
from kvlease.handoff.wire import WireError
from kvlease.kvcache.landing import Expectation
from kvlease.kvcache.seal import chain_hashes
from kvlease.kvcache.sizing import blocks_for, choice_blocks
from kvlease.peering.attempt_stream import AttemptStream
from kvlease.peering.errors import PairLost
from kvlease.peering.identity import draw_grant
from kvlease.sampling.tokens import DrawnToken

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrived:
    """The prompt's KV is here, verified, in the first of these rooms, which are the caller's now. First tokens and rooms: one a choice."""

    rooms: Rooms
    first: tuple[DrawnToken, ...]


AttemptEnd = Arrived | Complete | Rejected | Aborted


class AttemptRun:
    """One attempt at one peer. `run` once."""

    def __init__(
        self, proposal: Proposal, peer: Peer, memory: DecodeMemory, thread: WorkThread, vocab_size: int
    ) -> None:
        """Nothing is held or sent before `run`."""
        num_tokens = len(proposal.prompt_token_ids)
        self._proposal, self._peer, self._memory, self._thread = proposal, peer, memory, thread
        num_blocks = blocks_for(num_tokens, memory.kv.block_size)
        first = FirstToken(vocab_size, proposal.max_tokens, proposal.end_token_ids)
        self._attempt = DecodeAttempt(num_tokens, num_blocks, num_choices=proposal.num_choices, first_token=first)
        self._inbox: asyncio.Queue[DecodeHappening] = asyncio.Queue()
        self._limits = Limits()
        self._rooms: Rooms = ()
        self._lease: Lease | None = None

    def post(self, happening: DecodeHappening) -> None:
        """Something happened."""
        self._inbox.put_nowait(happening)

    async def run(self) -> AttemptEnd:
        """Until it concludes. Cancelled: ended on both sides, nothing held."""
        stream = self._peer.pair.open_attempt()
        self._peer.pair.standing.add(self)
        tasks = [self._start(self._listen(stream))]
        outcome: AttemptEnd | None = None
        try:
            await self._send(stream, SendUp(self._proposal))
            outcome = await self._drive(stream, tasks)
            return outcome
        finally:
            self._peer.pair.standing.discard(self)
            self._withdraw(stream, tasks, keep_rooms=isinstance(outcome, Arrived))

    async def _drive(self, stream: AttemptStream, tasks: list[asyncio.Task[None]]) -> AttemptEnd:
        while True:
            self._attempt, actions = decode_step(self._attempt, await self._next())
            for action in actions:
                if isinstance(action, Conclude):
                    return self._concluded(action)
                await self._perform(action, stream, tasks)

    def _concluded(self, action: Conclude) -> AttemptEnd:
        if isinstance(action.outcome, Committed):
            assert self._rooms, "a commit is legal only with a lease, a lease only with room"
            return Arrived(self._rooms, action.outcome.first_tokens)
        return action.outcome

    async def _next(self) -> DecodeHappening:
        """What happened next; while prefill owes its verdict or blocks, standing still for too long is something that happens.

        A prefill server that works for others, or sends to this one, has not come to this attempt yet; one that does neither never will.
        """
        lease = self._attempt.lease
        owes = lease is not None or self._attempt.state is DecodeState.PROPOSED
        while True:
            seen = self._peer.pair.progress
            try:
                async with asyncio.timeout(self._limits.stall_s if owes else None):
                    return await self._inbox.get()
            except TimeoutError:
                if self._attempt.state is not DecodeState.CLOSING and self._peer.pair.progress != seen:
                    continue
                missing = f"{lease.num_blocks - lease.num_verified} blocks are" if lease else "the verdict is"
                message = f"{missing} missing and nothing has moved for {self._limits.stall_s} s"
                return Ended(aborted(AbortReason.PEER_STALLED, message))

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """A task whose failure is something that happens to the attempt, rather than silence until the deadline."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._note_failure)
        return task

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("attempt.task_failed", exc_info=error)
            self.post(Ended(aborted(AbortReason.ENGINE_FAILED, f"decode failed while the attempt stood: {error!r}")))

    async def _perform(self, action: DecodeAction, stream: AttemptStream, tasks: list[asyncio.Task[None]]) -> None:
        match action:
            case AskRoom():
                tasks.append(self._start(self._find_room()))
            case OpenLease(lease):
                self._open(lease)
            case SendUp():
                await self._send(stream, action)

    async def _send(self, stream: AttemptStream, action: SendUp) -> None:
        try:
            await stream.send(action.message)
        except PairLost as error:
            self.post(Ended(aborted(AbortReason.PEER_LOST, str(error))))

    async def _listen(self, stream: AttemptStream) -> None:
        try:
            async for message in stream.messages():
                self.post(message)
            reason = aborted(AbortReason.PEER_LOST, "prefill ended the attempt's stream")
        except WireError as error:
            reason = aborted(AbortReason.PROTOCOL_ERROR, str(error))
        except PairLost as error:
            reason = aborted(AbortReason.PEER_LOST, str(error))
        self.post(Ended(reason))

    async def _find_room(self) -> None:
        proposal, kv = self._proposal, self._memory.kv
        num_tokens = len(proposal.prompt_token_ids)
        sizes = choice_blocks(num_tokens, proposal.max_tokens, proposal.num_choices, kv.block_size)
        self._rooms = await self._memory.hold(sizes)
        first = self._rooms[0]
        kv.pin((first,))
        try:
            # The blocks before are wholly overwritten by what lands; these are written slot by slot.
            await self._thread.run(kv.scrub, first, num_tokens // kv.block_size)
        finally:
            kv.unpin((first,))
        self.post(RoomReserved(draw_grant(proposal.epoch), first.holder))

    def _open(self, lease: Lease) -> None:
        assert self._rooms, "the lease is opened for the room that was reserved"
        proposal, block_size = self._proposal, self._memory.kv.block_size
        expectation = Expectation(
            lease.grant.lease_id,
            lease.grant.nonce,
            proposal.fingerprint,
            chain_hashes(proposal.prompt_token_ids, block_size),
            lease.num_tokens,
            block_size,
        )
        self._peer.dock.open(lease, Berth(self._rooms[0], expectation, self))
        self._lease = lease

    def _withdraw(self, stream: AttemptStream, tasks: list[asyncio.Task[None]], *, keep_rooms: bool) -> None:
        """The lease first: no block can land any more; then the room, at once; then everybody else.

        Nothing is awaited: a task that is cancelled twice still frees everything. Who is asked for room just now gives it back itself.
        """
        if self._lease is not None:
            self._peer.dock.end(self._lease.grant.lease_id)
        for room in () if keep_rooms else self._rooms:
            self._memory.kv.free(room)
        for task in tasks:
            task.cancel()
        stream.cancel()
