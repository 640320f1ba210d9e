"""The promises of the runner: the same text as the model alone, whatever the chunks, blocks and company; and books that never run ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kvlease.engine.batch import Draw, SequenceStep
from kvlease.engine.errors import EngineFailed, LogitsNotFinite
from kvlease.engine.runner import ModelRunner
from kvlease.kvcache.errors import UnprovenSlot
from kvlease.sampling.params import SamplingParams
from tests.engine.texts import CLOSE, FAMILIES, GREEDY, Text, prompt, reference, run_together, spied, the_token

MakeRunner = Callable[..., ModelRunner]
FolderOf = Callable[[str], Path]

SHUFFLED = (11, 3, 20, 7, 1, 15)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_prompts_give_the_logits_of_each_prompt_alone(
    family: str, make_runner: MakeRunner, folder_of: FolderOf
) -> None:
    runner, spy = spied(make_runner(family))
    prompts = [prompt(37, 1), prompt(1, 2), prompt(16, 3), prompt(50, 4)]
    texts = [Text(runner, table) for table in ((0, 1, 2), (3,), (9,), (8, 4, 12, 5))]
    tokens = run_together(list(zip(texts, prompts, strict=True)))
    wanted = torch.stack([reference(folder_of(family)).logits(ids)[-1] for ids in prompts])
    assert torch.allclose(spy.logits, wanted, rtol=0, atol=CLOSE)
    assert list(tokens) == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_greedy_text_is_the_models_own_in_every_chunk_size(
    family: str, chunk: int, make_runner: MakeRunner, folder_of: FolderOf
) -> None:
    ids = prompt(40, 5)
    assert Text(make_runner(family), SHUFFLED).generate(ids, 12, chunk) == reference(folder_of(family)).generate(
        ids, 12
    )


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_greedy_text_is_the_models_own_in_every_block_size(
    block_size: int, is_shuffled: bool, make_runner: MakeRunner, folder_of: FolderOf
) -> None:
    ids = prompt(33, 6)
    blocks = list(range(2, 2 + -(-48 // block_size)))
    table = blocks[::-1] if is_shuffled else blocks
    runner = make_runner(block_size=block_size, num_blocks=64)
    assert Text(runner, table).generate(ids, 12, 20) == reference(folder_of("llama")).generate(ids, 12)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_chunks_and_decodes_equals_each_alone(family: str, make_runner: MakeRunner) -> None:
    ids = [prompt(30, 7), prompt(45, 8), prompt(12, 9), prompt(26, 10)]
    alone = [Text(make_runner(family), SHUFFLED).generate(part, 6) for part in ids]
    runner = make_runner(family)
    first, second, third, fourth = (
        Text(runner, t) for t in ((0, 1, 2), (9, 3, 5, 22), (13,) * 1 + (14,), (19, 18, 17))
    )
    tokens: list[list[int | None]] = [[], [], [], []]
    tokens[0].append(first.prefill(ids[0], 30))
    tokens[1].append(second.prefill(ids[1], 17))
    third.run(ids[2][:5], None)
    together = [(first, tokens[0][-1:]), (third, ids[2][5:]), (second, tokens[1][-1:]), (fourth, ids[3])]
    parts = [(text, cast("list[int]", list(part))) for text, part in together]
    for index, token in zip((0, 2, 1, 3), run_together(parts), strict=True):
        tokens[index].append(token)
    while len(tokens[3]) < 6:
        row = [
            (t, cast("list[int]", mine[-1:])) for t, mine in zip((first, second, third, fourth), tokens, strict=True)
        ]
        for mine, token in zip(tokens, run_together(row), strict=True):
            mine.append(token)
    assert [mine[:6] for mine in tokens] == alone


def test_a_step_that_wants_no_token_gets_none_and_leaves_the_others_theirs(make_runner: MakeRunner) -> None:
    runner, spy = spied(make_runner())
    quiet, loud = Text(runner, (0, 1)), Text(runner, (2, 3))
    steps = [quiet.step(prompt(9, 1), None), loud.step(prompt(8, 2))]
    tokens = runner.run(steps)
    assert tokens[0] == ()
    assert the_token(tokens[1]) == Text(runner, (5,)).run(prompt(8, 2))
    assert spy.logits.shape[0] == 1


def test_a_pass_in_which_nobody_wants_a_token_makes_no_logits(make_runner: MakeRunner) -> None:
    runner, spy = spied(make_runner())
    assert Text(runner, (0, 1)).run(prompt(20, 1), None) is None
    assert spy.logits.shape[0] == 0


def test_sampled_text_is_the_same_in_every_chunk_size_and_company(make_runner: MakeRunner) -> None:
    spec = Draw(SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=12))
    tokens = set()
    for chunk in (3, 40):
        text = Text(make_runner(), SHUFFLED)
        token = text.prefill(prompt(40, 11), chunk, spec)
        other = Text(text.runner, (2, 4))
        drawn = run_together([(other, prompt(5, 1)), (text, [token])], spec)
        tokens.add((token, drawn[1]))
    assert len(tokens) == 1


# ------------------------------------------------------------------------------------------------------------ the bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_bytes_are_the_same_whatever_blocks_they_lie_in(dtype: str, make_runner: MakeRunner) -> None:
    kept = set()
    for block_size, table in ((16, (4, 5, 6)), (16, (9, 2, 21)), (8, (7, 3, 1, 9, 11, 0)), (32, (1, 0))):
        text = Text(make_runner(block_size=block_size, dtype=dtype), table)
        text.prefill(prompt(40, 12), 15)
        kept.add(text.kv_bytes())
    assert len(kept) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_kv_of_chunks_is_that_of_one_pass_up_to_rounding(dtype: str, chunk: int, make_runner: MakeRunner) -> None:
    whole, parts = (Text(make_runner(dtype=dtype), SHUFFLED) for _ in range(2))
    whole.prefill(prompt(40, 13), 40)
    parts.prefill(prompt(40, 13), chunk)
    for layer, name in ((layer, name) for layer in range(2) for name in "kv"):
        one, other = (t.runner.storage.array(layer, name).float() for t in (whole, parts))
        # bfloat16 keeps eight bits: one rounding of a number below eight is at most 1/32.
        assert torch.allclose(one, other, rtol=2e-2, atol=1e-4 if dtype == "float32" else 2e-1), (layer, name)


def test_the_pool_holds_the_dtype_of_the_model(make_runner: MakeRunner) -> None:
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        runner = make_runner(dtype=dtype)
        assert runner.dtype == dtype
        assert runner.storage.array(1, "v").element_size() == size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_others_left_in_the_pool_changes_nothing(dtype: str, make_runner: MakeRunner) -> None:
    """Another tenant's remains in every slot that is not the text's own, those of its own blocks behind its end included."""
    ids, results = prompt(37, 14), []
    for poison in (0.0, float("nan")):
        runner, spy = spied(make_runner(dtype=dtype))
        for layer, name in ((layer, name) for layer in range(2) for name in "kv"):
            runner.storage.array(layer, name).fill_(poison)
        lone, follower = Text(runner, SHUFFLED[:3]), Text(runner, (16, 17, 18))
        logits = []
        for parts in (
            [(lone, ids[:20])],
            [(lone, ids[20:]), (follower, ids[:5])],
            [(follower, ids[5:6]), (lone, [5])],
            [(lone, [6]), (follower, ids[6:30])],
        ):
            run_together(parts)
            logits.append(spy.logits)
        results.append((torch.cat(logits), lone.kv_bytes(), follower.kv_bytes()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


# ------------------------------------------------------------------------------------------------------------ the books


def test_a_completed_pass_proves_exactly_what_it_wrote(make_runner: MakeRunner) -> None:
    text = Text(make_runner(), (4, 2))
    text.run(prompt(19, 1))
    ledger = text.runner.ledger
    assert ledger.computed(text.sequence_id, text.table, 19).num_tokens == 19
    with pytest.raises(UnprovenSlot):
        ledger.readable(text.sequence_id, text.table, 20)


def test_a_failed_pass_proves_nothing_and_can_be_run_again(make_runner: MakeRunner, folder_of: FolderOf) -> None:
    runner, spy = spied(make_runner())
    text = Text(runner, (4, 2, 9))
    text.run(prompt(20, 1)[:12], None)
    spy.fails_at_layer = 1
    with pytest.raises(EngineFailed, match="no memory left"):
        runner.run([text.step(prompt(20, 1)[12:])])
    runner.ledger.readable(text.sequence_id, text.table, 12)
    with pytest.raises(UnprovenSlot):
        runner.ledger.readable(text.sequence_id, text.table, 13)
    spy.fails_at_layer = None
    assert text.run(prompt(20, 1)[12:]) == reference(folder_of("llama")).generate(prompt(20, 1), 1)[0]


def test_a_step_without_finite_logits_ends_alone_and_stays_unproven(make_runner: MakeRunner) -> None:
    runner, spy = spied(make_runner())
    texts = [Text(runner, (i,)) for i in range(3)]
    wanted = runner.run([text.step(prompt(6, i)) for i, text in enumerate(texts)])
    for text in texts:
        runner.ledger.clear(text.table)
    spy.spoiled_rows = (1,)
    with pytest.raises(LogitsNotFinite) as caught:
        runner.run([text.step(prompt(6, i)) for i, text in enumerate(texts)])
    assert caught.value.failed == (1,)
    assert (caught.value.drawn[0], caught.value.drawn[2]) == (wanted[0], wanted[2])
    for text in (texts[0], texts[2]):
        runner.ledger.computed(text.sequence_id, text.table, 6)
    with pytest.raises(UnprovenSlot):
        runner.ledger.readable(texts[1].sequence_id, texts[1].table, 1)


def test_failed_steps_are_named_by_their_place_among_all_steps(make_runner: MakeRunner) -> None:
    runner, spy = spied(make_runner())
    quiet, broken = Text(runner, (0,)), Text(runner, (1,))
    spy.spoiled_rows = (0,)
    with pytest.raises(LogitsNotFinite) as caught:
        runner.run([quiet.step(prompt(4), None), broken.step(prompt(4))])
    assert caught.value.failed == (1,)
    runner.ledger.computed(quiet.sequence_id, quiet.table, 4)


def test_a_context_that_was_cleared_since_it_was_proven_is_refused_before_anything_is_computed(
    make_runner: MakeRunner,
) -> None:
    text = Text(make_runner(), (4, 2))
    text.run(prompt(19, 1))
    step = text.step([5])
    text.runner.ledger.clear([4])
    pulse = text.runner.pulse
    with pytest.raises(UnprovenSlot):
        text.runner.run([step])
    assert text.runner.pulse == pulse


def test_no_step_may_write_into_what_another_one_reads(make_runner: MakeRunner) -> None:
    runner = make_runner()
    victim, intruder = Text(runner, (4, 2)), Text(runner, (7,))
    victim.run(prompt(19, 1))
    intruder.table = (4,)
    with pytest.raises(AssertionError, match="over another"):
        runner.run([intruder.step(prompt(3)), victim.step([5])])
    runner.ledger.readable(victim.sequence_id, victim.table, 19)


def test_two_steps_that_would_write_one_slot_are_refused(make_runner: MakeRunner) -> None:
    runner = make_runner()
    steps = [Text(runner, (3,)).step(prompt(3)), Text(runner, (3,)).step(prompt(2))]
    with pytest.raises(AssertionError, match="same slot"):
        runner.run(steps)


def test_a_context_without_a_proof_is_refused(make_runner: MakeRunner) -> None:
    runner = make_runner()
    step = SequenceStep(cast("Any", (1, (0,), 0)), (5,), (GREEDY,))
    with pytest.raises(AssertionError, match="must be proven"):
        runner.run([step])


def test_a_token_outside_the_vocabulary_is_refused(make_runner: MakeRunner) -> None:
    text = Text(make_runner(), (0,))
    with pytest.raises(AssertionError, match="vocabulary"):
        text.run([text.runner.facts.vocab_size])


def test_the_pulse_counts_layers(make_runner: MakeRunner) -> None:
    text = Text(make_runner(), (0, 1))
    assert text.runner.pulse == 0
    text.generate(prompt(5), 3)
    assert text.runner.pulse == 3 * text.runner.facts.num_layers
