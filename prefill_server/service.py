"""The life of one attempt on prefill: the verdict, and then whatever its prompt has to say until the stream ends.

Never: lets a prompt outlive its stream, its deadline or its pair.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from kvlease.handoff.messages import (
    AbortReason,
    AttemptDown,
    AttemptUp,
    Proposal,
    RejectReason,
    Verdict,
)
from kvlease.handoff.prefill_attempt import EndedHere, Judged
from kvlease.handoff.verdicts import PrefillFacts, aborted, judge_prompt, rejected
from kvlease.handoff.wire import WireError
from kvlease.kvcache.memory import KVMemory
from kvlease.peering.incoming import IncomingPair, IncomingPairs, epoch_of
from prefill_server.departure import DepartureLine
from prefill_server.prompts import Prompt
from prefill_server.scheduler import PromptQueue

logger = logging.getLogger(__name__)

Send = Callable[[AttemptDown], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a prefill server is, for its verdicts. Tokens where not said otherwise."""

    fingerprint: bytes
    pool_tokens: int
    max_model_len: int
    vocab_size: int
    max_queue: int


class PrefillService:
    """All attempts of one prefill server."""

    def __init__(
        self,
        identity: Identity,
        kv: KVMemory,
        queue: PromptQueue,
        pairs: IncomingPairs,
        line_of: Callable[[IncomingPair], DepartureLine],
    ) -> None:
        """No attempt yet. `line_of` gives a pair's departure line."""
        self._identity, self._kv, self._queue, self._pairs, self._line_of = identity, kv, queue, pairs, line_of
        self.counters: Counter[str] = Counter()
        self.is_draining = False

    async def serve(self, messages: AsyncIterator[AttemptUp], send: Send) -> None:
        """One attempt, from its proposal to its end. Cancelled: the stream has ended, and so has the attempt."""
        try:
            proposal = await anext(messages, None)
        except WireError as error:
            await send(rejected(RejectReason.INVALID_REQUEST, str(error)))
            return
        if not isinstance(proposal, Proposal):
            await send(rejected(RejectReason.INVALID_REQUEST, "an attempt begins with its proposal"))
            return
        pair = self._pairs.find(proposal.decode_incarnation)
        verdict = self._judge(proposal, pair)
        self.counters[f"verdicts_{getattr(verdict, 'reason', 'admitted')}"] += 1
        if pair is None:
            await send(verdict)
            return
        await self._host(proposal, verdict, pair, messages, send)

    def _judge(self, proposal: Proposal, pair: IncomingPair | None) -> Verdict:
        identity = self._identity
        facts = PrefillFacts(
            identity.pool_tokens,
            identity.max_model_len,
            identity.vocab_size,
            self._queue.num_waiting,
            identity.max_queue,
            self.is_draining,
            epoch_of(pair),
            identity.fingerprint,
        )
        return judge_prompt(proposal, facts)

    async def _host(
        self,
        proposal: Proposal,
        verdict: Verdict,
        pair: IncomingPair,
        messages: AsyncIterator[AttemptUp],
        send: Send,
    ) -> None:
        prompt = Prompt(proposal, pair.wire_block_size, self._kv, self._queue, self._line_of(pair))
        pair.standing.add(prompt)
        listener = asyncio.create_task(_listen(prompt, messages))
        listener.add_done_callback(lambda task: _note_failure(prompt, task))
        try:
            prompt.happen(Judged(verdict))
            async with asyncio.timeout(proposal.remaining_s):
                await _tell(prompt, send)
        except TimeoutError:
            prompt.happen(EndedHere(aborted(AbortReason.DEADLINE, "the deadline has passed")))
            await _tell(prompt, send)
        finally:
            pair.standing.discard(prompt)
            listener.cancel()
            prompt.happen(EndedHere(aborted(AbortReason.CANCELLED, "the attempt's stream has ended")))


async def _tell(prompt: Prompt, send: Send) -> None:
    while (message := await prompt.outbox.get()) is not None:
        await send(message)


async def _listen(prompt: Prompt, messages: AsyncIterator[AttemptUp]) -> None:
    try:
        async for message in messages:
            if isinstance(message, Proposal):
                raise WireError("a second proposal is not part of any attempt")
            prompt.happen(message)
        cause = aborted(AbortReason.CANCELLED, "decode ended the attempt's stream")
    except WireError as error:
        cause = aborted(AbortReason.PROTOCOL_ERROR, str(error))
    prompt.happen(EndedHere(cause))


def _note_failure(prompt: Prompt, task: asyncio.Task[None]) -> None:
    """Nobody listens any more: without an end now, the prompt would hold its room until its deadline."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("attempt.task_failed", exc_info=error)
        prompt.happen(
            EndedHere(aborted(AbortReason.ENGINE_FAILED, f"prefill failed while the attempt stood: {error!r}"))
        )
