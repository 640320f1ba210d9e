"""One attempt, performed: feeds `decode_step` with what happens and does what it says.

Never: decides; or leaves a lease, a room or a stream behind, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass

from decode_server.holding import AttemptHolding
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
from kvlease.handoff.limits import Limits
from kvlease.handoff.messages import Aborted, AbortReason, Complete, Proposal, Rejected
from kvlease.handoff.tables import DecodeState
from kvlease.handoff.verdicts import aborted
from kvlease.handoff.wire import WireError
from kvlease.kvcache.sizing import blocks_for
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
        self._holding = AttemptHolding(proposal, memory.kv, peer.dock)

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
            assert self._holding.rooms, "a commit is legal only with a lease, a lease only with room"
            return Arrived(self._holding.rooms, action.outcome.first_tokens)
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
                self._holding.open(lease, self)
            case SendUp():
                await self._send(stream, action)

    async def _send(self, stream: AttemptStream, action: SendUp) -> None:
        """A stream that has ended takes no message. Only its reader says so, after everything that prefill said before the end."""
        with suppress(PairLost):
            await stream.send(action.message)

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
        holding = self._holding
        rooms = await self._memory.hold(holding.sizes)
        holding.take(rooms)
        try:
            await self._thread.run(holding.scrub, rooms)
        finally:
            holding.scrubbed(rooms)
        self.post(RoomReserved(draw_grant(self._proposal.epoch), rooms[0].holder))

    def _withdraw(self, stream: AttemptStream, tasks: list[asyncio.Task[None]], *, keep_rooms: bool) -> None:
        """What is held, at once; then everybody else.

        Nothing is awaited: a task that is cancelled twice still frees everything. Who is asked for room just now gives it back itself.
        """
        self._holding.give_back(keep_rooms=keep_rooms)
        for task in tasks:
            task.cancel()
        stream.cancel()
