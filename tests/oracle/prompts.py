"""Prompts that real people could send: chats and raw text, from one token to nearly two thousand, in several scripts.

Never: random tokens; the model must be as sure of its next word as it is in use.
"""

from __future__ import annotations

from typing import Final

from kvlease.models.chat_template import ChatTemplate
from kvlease.models.tokenizer import Tokenizer

CHATS: Final = (
    "What is the capital of France?",
    "Write a haiku about the sea. 🌊🙂",
    "Объясни, почему небо голубое.",
    "用三句话介绍一下长城。",
    "ما هي أكبر مدينة في مصر؟",
    "भारत की राजधानी क्या है?",
    "東京から大阪まで何時間かかりますか。",
    "List three uses of a paper clip 📎, each in five words.",
    "What is 17 * 23? Think step by step.",
    "Fix this: def add(a, b): retrun a + b",
)
RAW: Final = (
    "The",
    "Once upon a time",
    "import numpy as np\n\ndef mean(xs):\n    ",
    "👩‍👩‍👧🏳️‍🌈🎉🎉🎉",
    "Ελλάδα και ελευθερία: η ιστορία",
    "1, 1, 2, 3, 5, 8, 13,",
    "한국의 수도는",
)
_PARAGRAPH: Final = (
    "The lighthouse keeper wrote in his diary every evening. On day {day} the wind came from the {side}, and {ships} "
    "ships passed before dark. He lit the lamp, trimmed the wick, and listened to the water under the rocks. "
)
_SIDES: Final = ("north", "east", "south", "west")
LONG: Final = (3, 8, 41)  # paragraphs; the last makes nearly two thousand tokens


def _diary(num_days: int) -> str:
    days = (_PARAGRAPH.format(day=day, side=_SIDES[day % 4], ships=day * 7 % 11 + 2) for day in range(1, num_days + 1))
    return "".join(days)


def real_prompts(tokenizer: Tokenizer, template: ChatTemplate) -> tuple[tuple[int, ...], ...]:
    """Token ids of the twenty prompts, chats and raw ones taking turns."""
    longest = [_diary(num_days) for num_days in LONG]
    chats = [
        template.render([{"role": "user", "content": text}])
        for text in (*CHATS, longest[1] + "\n\nHow many ships passed on day 2?")
    ]
    raw = [*RAW, longest[0], longest[2]]
    texts = [text for pair in zip(chats, raw, strict=False) for text in pair] + chats[len(raw) :]
    return tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
