"""The texts of one answer, one for each choice: what each event of the decode server lets a client see.

Never: shows anything of a choice that has ended, whatever still comes for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway.text import TextAssembler
from gateway.told import ToldToken
from kvlease.handoff.messages import ChoiceFinished, Finished, FinishReason, TokensGenerated


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of one choice arrived, or its end did.

    `text` is what they let a client see, and may be empty; `told` is of tokens whose text was shown by now; with a `reason` the choice ends.
    """

    text: str
    num_tokens: int
    told: tuple[ToldToken, ...] = ()
    index: int = 0
    reason: FinishReason | None = None


class AnswerTexts:
    """The choices of one answer."""

    def __init__(self, assemblers: Sequence[TextAssembler]) -> None:
        """One assembler for each choice; nothing has come."""
        self._assemblers = assemblers
        self._reasons: dict[int, FinishReason] = {}
        self._num_generated: dict[int, int] = {}  # of choices that a stop string did not end

    @property
    def is_done(self) -> bool:
        """Whether all choices have ended."""
        return len(self._reasons) == len(self._assemblers)

    @property
    def reason(self) -> FinishReason:
        """Of the first choice, which has ended."""
        return self._reasons[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices up to their ends, end tokens included; those behind a stop string were not asked for."""
        counts = enumerate(text.num_tokens for text in self._assemblers)
        return sum(self._num_generated.get(index, count) for index, count in counts)

    def take(self, event: TokensGenerated | ChoiceFinished | Finished) -> Iterator[Text]:
        """What the event, of a choice that was asked for, shows; nothing if the choice has ended."""
        match event:
            case TokensGenerated(token_ids, logprobs, index) if self._runs(index):
                text = self._assemblers[index]
                piece = text.push(token_ids, logprobs)
                if text.is_stopped:
                    self._reasons[index] = FinishReason.STOP
                yield Text(piece, len(token_ids), text.told(), index, self._reasons.get(index))
            case ChoiceFinished(index, reason, num_generated) if self._runs(index):
                yield self._ended(index, reason, num_generated)
            case Finished(reason, _, num_generated) if len(self._assemblers) == 1 and self._runs(0):
                yield self._ended(0, reason, num_generated)
            case _:
                pass

    def _runs(self, index: int) -> bool:
        return index not in self._reasons

    def _ended(self, index: int, reason: FinishReason, num_generated: int) -> Text:
        text = self._assemblers[index]
        tail = text.finish()
        self._reasons[index] = FinishReason.STOP if text.is_stopped else reason
        self._num_generated[index] = num_generated
        return Text(tail, 0, text.told(), index, self._reasons[index])
