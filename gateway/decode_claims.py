"""What a decode server says of one request must fit that request, before a client hears of it.

A token that the vocabulary has not would silently be no text, and a count that does not add up is text that got lost on the way.

Never: repairs what does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlease.handoff.messages import ChoiceFinished, Finished, FinishReason, GenerationRequest, TokensGenerated


@dataclass(frozen=True, slots=True)
class Expected:
    """What the gateway asked for. Counts are tokens, `max_tokens` those of one choice."""

    vocab_size: int
    num_prompt: int
    max_tokens: int
    num_choices: int = 1

    @classmethod
    def of(cls, request: GenerationRequest, vocab_size: int) -> Expected:
        """By a model of so many token ids."""
        return cls(vocab_size, len(request.prompt_token_ids), request.max_tokens, request.num_choices)

    def contradiction(self, event: TokensGenerated | ChoiceFinished | Finished, num_before: int) -> str | None:
        """What is wrong with an event that follows `num_before` tokens (of its choice; of all for Finished), or None."""
        if isinstance(event, Finished):
            if event.num_prompt_tokens != self.num_prompt:
                return f"it finished a prompt of {event.num_prompt_tokens} tokens, {self.num_prompt} were sent"
            # Each of several choices has said for itself why it ended, and how many tokens it has.
            return self._wrong_end(event, num_before) if self.num_choices == 1 else None
        if event.choice >= self.num_choices:
            return f"it spoke of choice {event.choice}, {self.num_choices} were asked for"
        if isinstance(event, TokensGenerated):
            return self._wrong_tokens(event.token_ids, num_before)
        return self._wrong_end(event, num_before)

    def _wrong_end(self, end: ChoiceFinished | Finished, num_before: int) -> str | None:
        # The end token is counted, and is not among the tokens.
        most = num_before + 1 if end.reason is FinishReason.STOP else num_before
        if not num_before <= end.num_generated_tokens <= min(most, self.max_tokens):
            return f"it counted {end.num_generated_tokens} tokens, {num_before} came of {self.max_tokens}"
        if end.reason is FinishReason.LENGTH and num_before < self.max_tokens:
            return f"it ended at its length after {num_before} tokens of {self.max_tokens}"
        return None

    def _wrong_tokens(self, token_ids: Sequence[int], num_before: int) -> str | None:
        if num_before + len(token_ids) > self.max_tokens:
            return f"it sent {num_before + len(token_ids)} tokens, {self.max_tokens} were asked for"
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                return f"it sent token {token_id}, the vocabulary has {self.vocab_size}"
        return None
