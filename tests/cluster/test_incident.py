"""The incident and its relatives: whatever goes wrong on the way, no byte of an earlier tenant reaches attention.

Decode's free memory is filled with a pattern before each test. A request then either gets the one-process text (a retry had no
fault) or ends with an error that names the failed check; what it never gets is a text made from the pattern.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from kvlease.engine.loading import CausalModel, load_model
from kvlease.engine.runner import ModelRunner
from kvlease.handoff.messages import Aborted, AbortReason, Finished, TokensGenerated
from kvlease.kvcache.seal import SEAL_BYTES, Seal, chain_hashes
from kvlease.kvcache.storage import KVStorage
from kvlease.models.facts import ModelFacts
from tests.cluster.harness import Cluster, Oracle, Shape, cluster, prompt_of, request_of
from tests.cluster.tampering import Tamper, TamperedTransport, resealed

PROMPT = prompt_of(100, 5)


def fill_with_an_earlier_tenant(running: Cluster) -> None:
    storage = running.decode_runner.storage
    for layer in range(len(storage.layout.layers)):
        for name in ("k", "v"):
            storage.array(layer, name).fill_(float("nan"))


def spoiled_byte(number: int, block: bytearray) -> bytearray:
    block[SEAL_BYTES + 11] ^= 1
    return block


def unwritten_seal(number: int, block: bytearray) -> bytearray:
    block[:SEAL_BYTES] = bytes(SEAL_BYTES)
    return block


def spoiled_seal(number: int, block: bytearray) -> bytearray:
    block[SEAL_BYTES // 4] ^= 1
    return block


def old_nonce(number: int, block: bytearray) -> bytearray:
    return resealed(block, nonce=os.urandom(16))


def wrong_position(number: int, block: bytearray) -> bytearray:
    return resealed(block, position=3)


def beyond_the_end(number: int, block: bytearray) -> bytearray:
    return resealed(block, position=10**6)


def other_tokens(number: int, block: bytearray) -> bytearray:
    return resealed(block, chain=os.urandom(16))


def other_layout(number: int, block: bytearray) -> bytearray:
    return resealed(block, fingerprint=os.urandom(16))


def fewer_tokens(number: int, block: bytearray) -> bytearray:
    return resealed(block, num_valid=1)


def missing_block(number: int, block: bytearray) -> bytearray | None:
    return None if number % 7 == 2 else block


def cut_short(number: int, block: bytearray) -> bytearray:
    return block[:-64]


def doubled() -> Tamper:
    kept: list[bytearray] = []

    def tamper(number: int, block: bytearray) -> bytearray:
        kept.append(bytearray(block))
        return bytearray(kept[-2]) if number % 7 == 1 else block

    return tamper


ALWAYS: list[tuple[str, Tamper, str]] = [
    ("spoiled byte", spoiled_byte, "digest"),
    ("spoiled seal", spoiled_seal, "tag"),
    ("old nonce", old_nonce, "nonce"),
    ("wrong position", wrong_position, "chain"),
    ("beyond the end", beyond_the_end, "position"),
    ("other tokens", other_tokens, "chain"),
    ("other layout", other_layout, "fingerprint"),
    ("fewer tokens", fewer_tokens, "valid_tokens"),
    ("cut short", cut_short, "length"),
    ("doubled", doubled(), "duplicate"),
    ("unwritten seal", unwritten_seal, "blocks are missing"),
    ("missing block", missing_block, "blocks are missing"),
]


@pytest.mark.parametrize(("tamper", "check"), [row[1:] for row in ALWAYS], ids=[row[0] for row in ALWAYS])
def test_a_fault_at_every_attempt_is_an_error_that_names_the_check(model: Path, tamper: Tamper, check: str) -> None:
    async def test() -> None:
        shape = Shape(wrap_prefill=lambda transport: TamperedTransport(transport, tamper))
        async with cluster(model, shape) as running:
            fill_with_an_earlier_tenant(running)
            (end,) = await running.events(request_of(PROMPT))
            assert isinstance(end, Aborted)
            assert 500 <= end.http_status < 600
            assert check in end.message
            await running.until_pools_are_full()

    asyncio.run(test())


@pytest.mark.parametrize("tamper", [spoiled_byte, old_nonce, wrong_position, cut_short])
def test_a_fault_that_happens_once_is_retried_in_silence(
    model: Path, oracle: Oracle, tamper: Callable[[int, bytearray], bytearray]
) -> None:
    def once(number: int, block: bytearray) -> bytearray:
        return tamper(number, block) if number == 1 else block

    async def test() -> None:
        shape = Shape(wrap_prefill=lambda transport: TamperedTransport(transport, once))
        async with cluster(model, shape) as running:
            fill_with_an_earlier_tenant(running)
            assert await running.text(request_of(PROMPT)) == oracle.text(PROMPT, 8)
            counters = running.decode.report().counters
            assert counters["attempts_failed"] == 1
            assert any(name.startswith("blocks_refused_") for name in counters)

    asyncio.run(test())


def test_a_stray_write_between_arrival_and_verification_spoils_one_handoff_and_no_read(
    model: Path, oracle: Oracle
) -> None:
    def stray(number: int, block: bytearray) -> bytearray:
        if number % 5 == 3:
            block[SEAL_BYTES + 64 : SEAL_BYTES + 128] = os.urandom(64)
        return block

    async def test() -> None:
        shape = Shape(wrap_decode=lambda transport: TamperedTransport(transport, stray))
        async with cluster(model, shape) as running:
            fill_with_an_earlier_tenant(running)
            prompts = [prompt_of(20 + 15 * n, n) for n in range(12)]
            for prompt, events in zip(
                prompts, await asyncio.gather(*(running.events(request_of(p)) for p in prompts)), strict=True
            ):
                tokens = tuple(t for event in events if isinstance(event, TokensGenerated) for t in event.token_ids)
                if isinstance(events[-1], Finished):
                    assert tokens == oracle.text(prompt, 8)
                else:
                    assert tokens == ()
                    assert isinstance(events[-1], Aborted)
            assert running.decode.report().counters["blocks_refused_digest"] > 0
            await running.until_pools_are_full()

    asyncio.run(test())


def test_a_fault_in_one_request_hurts_no_other(model: Path, oracle: Oracle) -> None:
    chains = set(chain_hashes(PROMPT, 16))

    def spoil_the_long_one(number: int, block: bytearray) -> bytearray:
        seal = Seal.unpack(block)
        assert isinstance(seal, Seal)
        return spoiled_byte(number, block) if seal.chain in chains else block

    async def test() -> None:
        shape = Shape(wrap_prefill=lambda transport: TamperedTransport(transport, spoil_the_long_one))
        async with cluster(model, shape) as running:
            fill_with_an_earlier_tenant(running)
            others = [prompt_of(30, seed) for seed in range(100, 120)]  # none shares a first block with PROMPT
            spoiled, *texts = await asyncio.gather(
                running.events(request_of(PROMPT)), *(running.text(request_of(prompt)) for prompt in others)
            )
            assert texts == [oracle.text(prompt, 8) for prompt in others]
            (end,) = spoiled
            assert isinstance(end, Aborted)
            assert "digest" in end.message
            await running.until_pools_are_full()

    asyncio.run(test())


class BrokenScrub(KVStorage):
    """A pool whose memory cannot be scrubbed for its first sequence."""

    num_left = 1

    def scrub(self, blocks: Iterable[int]) -> None:
        if self.num_left:
            self.num_left -= 1
            raise RuntimeError("the memory does not answer")
        super().scrub(blocks)


def test_a_room_that_cannot_be_scrubbed_ends_its_request_at_once_and_no_other(model: Path, oracle: Oracle) -> None:
    def break_scrub(runner: ModelRunner) -> ModelRunner:
        old = runner.storage
        return ModelRunner(
            load_tiny(model), runner.facts, BrokenScrub(old.layout, old.num_blocks, old.block_size), runner.ledger
        )

    async def play() -> None:
        async with cluster(model, Shape(wrap_decode_runner=break_scrub)) as running:
            async with asyncio.timeout(2):
                events = await running.events(request_of(PROMPT))
            assert isinstance(events[-1], Aborted)
            assert events[-1].reason is AbortReason.ENGINE_FAILED
            assert "the memory does not answer" in events[-1].message
            await running.until_pools_are_full()
            assert await running.text(request_of(PROMPT)) == oracle.text(PROMPT, 8)

    asyncio.run(play())


def load_tiny(folder: Path) -> CausalModel:
    return load_model(folder, ModelFacts.read(folder).family, "float32", torch.device("cpu"))
