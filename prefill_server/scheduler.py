"""Which prompts are computed next: first come, first served, in chunks.

Never: starts a prompt without room for all of it, or splits one that fits a chunk.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from kvlease.engine.batch import SequenceStep
from kvlease.handoff.messages import AbortReason
from kvlease.handoff.prefill_attempt import EndedHere, Started
from kvlease.handoff.verdicts import aborted
from kvlease.kvcache.errors import UnprovenSlot
from kvlease.kvcache.memory import KVMemory, Room
from kvlease.kvcache.sizing import blocks_for
from prefill_server.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt for the next pass: tokens up to `end`. `is_new`: its room is to be scrubbed first."""

    prompt: Prompt
    room: Room
    end: int
    step: SequenceStep
    is_new: bool


class PromptQueue:
    """Waiting prompts, and those whose computation has begun."""

    def __init__(self, kv: KVMemory, chunk_tokens: int) -> None:
        """Nobody waits."""
        self._kv, self._chunk_tokens = kv, chunk_tokens
        kv.on_free = self._room_is_free
        self._waiting: deque[Prompt] = deque()
        self._begun: list[Prompt] = []
        self.changed = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Admitted, and not begun."""
        return len(self._waiting)

    @property
    def num_begun(self) -> int:
        """Begun, and not wholly computed."""
        return len(self._begun)

    def enter(self, prompt: Prompt) -> None:
        """Take the last place."""
        self._waiting.append(prompt)
        self.changed.set()

    def leave(self, prompt: Prompt) -> None:
        """Give the place up. Harmless without one."""
        if prompt in self._waiting:
            self._waiting.remove(prompt)
        if prompt in self._begun:
            self._begun.remove(prompt)
        self.changed.set()

    def _room_is_free(self) -> None:
        self.changed.set()

    def computed(self, prompt: Prompt) -> None:
        """A chunk of it was computed."""
        if prompt in self._begun and prompt.attempt.num_computed == prompt.attempt.num_tokens:
            self._begun.remove(prompt)

    def next_chunks(self) -> list[Chunk]:
        """What the next pass is to compute, at most `chunk_tokens` tokens; empty: nothing can run now."""
        budget = self._chunk_tokens
        chunks: list[Chunk] = []
        for prompt in tuple(self._begun):
            if budget > 0:
                budget -= self._add(chunks, prompt, budget, is_new=False)
        while self._waiting and budget > 0:
            prompt = self._waiting[0]
            num_tokens = prompt.attempt.num_tokens
            if chunks and budget < min(num_tokens, self._chunk_tokens):
                break  # a prompt of one chunk is computed in one
            if not self._begin(prompt):
                break
            budget -= self._add(chunks, prompt, budget, is_new=True)
        return chunks

    def _begin(self, prompt: Prompt) -> bool:
        room = self._kv.hold(blocks_for(prompt.attempt.num_tokens, self._kv.block_size))
        if room is None:
            return False
        self._waiting.popleft()
        self._begun.append(prompt)
        prompt.room = room
        prompt.happen(Started(in_one_chunk=prompt.attempt.num_tokens <= self._chunk_tokens))
        return True

    def _add(self, chunks: list[Chunk], prompt: Prompt, budget: int, *, is_new: bool) -> int:
        assert prompt.room is not None, "a begun prompt has room"
        first, token_ids = prompt.attempt.num_computed, prompt.proposal.prompt_token_ids
        end = min(first + budget, len(token_ids))
        try:
            context = self._kv.ledger.readable(prompt.room.holder, prompt.room.table, first)
        except UnprovenSlot as error:
            prompt.happen(EndedHere(aborted(AbortReason.ENGINE_FAILED, str(error))))
            return 0
        step = SequenceStep(context, token_ids[first:end], prompt.draws if end == len(token_ids) else ())
        chunks.append(Chunk(prompt, prompt.room, end, step, is_new))
        return end - first
