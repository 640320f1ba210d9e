"""A verdict says both numbers, and has the code and status of its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlease.handoff.messages import Admitted, Epoch, GenerationRequest, Rejected, RejectReason
from kvlease.handoff.verdicts import REJECTIONS, DecodeFacts, PrefillFacts, judge_prompt, judge_request
from tests.handoff.joined import EPOCH, proposal

PREFILL = PrefillFacts(64, 48, 100, 1, 4, draining=False, epoch=EPOCH, fingerprint=b"f" * 16)
DECODE = DecodeFacts(64, 48, 100, 1, 4, draining=False)


def request(num_tokens: int, max_tokens: int) -> GenerationRequest:
    asked = proposal(num_tokens, max_tokens)
    ids, rest = (asked.request_id, asked.tenant, asked.prompt_token_ids), (asked.sampling, asked.end_token_ids, 5.0)
    return GenerationRequest(*ids, max_tokens, *rest, ())


def test_what_fits_is_admitted_behind_those_that_wait() -> None:
    assert judge_prompt(proposal(48), PREFILL) == Admitted(1)
    assert judge_request(request(40, 8), DECODE) is None


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (replace(PREFILL, epoch=None), RejectReason.STALE_PAIR),
        (replace(PREFILL, epoch=Epoch(8)), RejectReason.STALE_PAIR),
        (replace(PREFILL, fingerprint=b"g" * 16), RejectReason.MISMATCH),
        (replace(PREFILL, pool_tokens=9), RejectReason.PROMPT_TOO_LONG),
        (replace(PREFILL, vocab_size=5), RejectReason.INVALID_REQUEST),
        (replace(PREFILL, draining=True), RejectReason.DRAINING),
        (replace(PREFILL, num_queued=4), RejectReason.QUEUE_FULL),
    ],
)
def test_prefill_rejects(facts: PrefillFacts, reason: RejectReason) -> None:
    verdict = judge_prompt(proposal(10), facts)
    assert isinstance(verdict, Rejected)
    assert verdict.reason is reason
    assert (verdict.code, verdict.http_status) == (REJECTIONS[reason].code, REJECTIONS[reason].http_status)


@pytest.mark.parametrize(("sizes", "numbers"), [((48, 1), ("48", "48")), ((40, 9), ("40", "9", "48"))])
def test_decodes_door_names_the_numbers(sizes: tuple[int, int], numbers: tuple[str, ...]) -> None:
    verdict = judge_request(request(*sizes), DECODE)
    assert verdict is not None
    assert all(number in verdict.message for number in numbers)


@pytest.mark.parametrize(
    ("block_size", "num_choices", "fits"), [(1, 4, True), (1, 5, False), (16, 2, True), (16, 3, False)]
)
def test_decodes_door_counts_the_room_of_all_choices(block_size: int, num_choices: int, fits: bool) -> None:
    asked = replace(request(30, 8), num_choices=num_choices)
    verdict = judge_request(asked, replace(DECODE, block_size=block_size, pool_tokens=80 if block_size == 16 else 64))
    assert (verdict is None) == fits
    assert verdict is None or (verdict.param, verdict.http_status) == ("n", 400)


def test_prefill_names_both_numbers() -> None:
    verdict = judge_prompt(proposal(49), PREFILL)
    assert isinstance(verdict, Rejected)
    assert "49" in verdict.message
    assert "48" in verdict.message
