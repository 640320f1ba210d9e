"""The running batch: which sequences are decoded, what each step asks for, and when a text ends.

Never: builds a step on a context that the ledger has not proven for that very sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvlease.engine.batch import Draw, SequenceStep
from kvlease.engine.past import PastTokens, PromptTokens
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    ChoiceFinished,
    FinishReason,
    GenerationRequest,
    TokensGenerated,
)
from kvlease.handoff.verdicts import aborted
from kvlease.kvcache.errors import UnprovenSlot
from kvlease.kvcache.ledger import SlotLedger
from kvlease.kvcache.memory import Room
from kvlease.sampling.params import SamplingParams
from kvlease.sampling.tokens import DrawnToken

SequenceEvent = TokensGenerated | ChoiceFinished | Aborted
Events = asyncio.Queue[SequenceEvent]


@dataclass(eq=False, slots=True)
class Sequence:
    """One text in the making, of one choice. The last of `generated` is not in the KV memory yet: the next step puts it there."""

    request: GenerationRequest
    room: Room
    choice: int
    events: Events  # of all choices of the request
    sampling: SamplingParams
    on_end: Callable[[int], None]  # with the choice: its room is free now, whoever has read its last tokens
    past: PastTokens | None = None  # where a penalty asks for it
    generated: list[int] = field(default_factory=list)
    is_over: bool = False

    @classmethod
    def begin(
        cls, request: GenerationRequest, rooms: Iterable[Room], events: Events, on_end: Callable[[int], None]
    ) -> list[Sequence]:
        """The texts of all choices. The prompt is in each room, and nothing is generated."""
        sampling, prompt = request.sampling, PromptTokens(request.prompt_token_ids)
        return [
            cls(
                request,
                room,
                choice,
                events,
                sampling.for_choice(choice),
                on_end,
                PastTokens(prompt) if sampling.penalises else None,
            )
            for choice, room in enumerate(rooms)
        ]

    @property
    def num_generated(self) -> int:
        """Tokens drawn so far, an end token included."""
        return len(self.generated)

    def take(self, drawn: DrawnToken) -> bool:
        """A token was drawn: tell the client. Whether it ends the text."""
        assert not self.is_over, "an ended text gets no further token"
        token_id = drawn.token_id
        self.generated.append(token_id)
        if self.past is not None:
            self.past.add(token_id)
        if token_id in self.request.end_token_ids:
            self.end(self._finished(FinishReason.STOP))
            return True
        self.events.put_nowait(TokensGenerated.of(drawn, self.choice))
        if self.num_generated < self.request.max_tokens:
            return False
        self.end(self._finished(FinishReason.LENGTH))
        return True

    def end(self, event: ChoiceFinished | Aborted) -> None:
        """The last event of this text."""
        if not self.is_over:
            self.is_over = True
            self.events.put_nowait(event)
            self.on_end(self.choice)

    def step(self, ledger: SlotLedger) -> SequenceStep:
        """The next step. Raises `UnprovenSlot` if anything before the last token is not proven for this sequence."""
        num_known = len(self.request.prompt_token_ids) + self.num_generated - 1
        context = ledger.readable(self.room.holder, self.room.table, num_known)
        banned = self.sampling.banned(self.request.end_token_ids, self.num_generated)
        return SequenceStep(context, (self.generated[-1],), (Draw(self.sampling, banned, self.past),))

    def _finished(self, reason: FinishReason) -> ChoiceFinished:
        return ChoiceFinished(self.choice, reason, self.num_generated)


class RunningBatch:
    """Sequences in the order they joined. A step takes `max_batch` of them; those that waited longest come first."""

    def __init__(self, ledger: SlotLedger, max_batch: int) -> None:
        """Nothing runs."""
        self._ledger, self._max_batch = ledger, max_batch
        self._sequences: list[Sequence] = []
        self.has_work = asyncio.Event()

    def __len__(self) -> int:
        """How many run."""
        return len(self._sequences)

    def join(self, sequence: Sequence) -> None:
        """From the next step on."""
        self._sequences.append(sequence)
        self.has_work.set()

    def leave(self, sequence: Sequence) -> None:
        """No step will take it any more. Harmless when it has left."""
        if sequence in self._sequences:
            self._sequences.remove(sequence)
        if not self._sequences:
            self.has_work.clear()

    def next_steps(self) -> list[tuple[Sequence, SequenceStep]]:
        """What the next forward pass is to compute. A sequence whose context is not proven ends here, alone."""
        steps = []
        for sequence in tuple(self._sequences[: self._max_batch]):
            try:
                steps.append((sequence, sequence.step(self._ledger)))
            except UnprovenSlot as error:
                self.fail(sequence, str(error))
        if len(self._sequences) > self._max_batch:  # the others are first in the next step
            taken = [sequence for sequence, _ in steps]
            self._sequences = [s for s in self._sequences if s not in taken] + taken
        return steps

    def fail(self, sequence: Sequence, message: str) -> None:
        """The engine cannot go on with it."""
        sequence.end(aborted(AbortReason.ENGINE_FAILED, message))
        self.leave(sequence)

    def publish(self, sequence: Sequence, drawn: DrawnToken) -> None:
        """A step drew a token; a sequence that was ended in the meantime does not get it."""
        if sequence.is_over or sequence not in self._sequences:
            return
        if sequence.take(drawn):
            self.leave(sequence)
