"""The tiny model folders."""

import time
from pathlib import Path
from typing import Any

import pytest

from kvlease.models.facts import FAMILIES
from kvlease.models.tiny import SPECIAL_TOKENS, make_tiny_model
from kvlease.models.tokenizer import Tokenizer

NUM_TOKENS = 48


def greedy(folder: Path, ids: list[int]) -> tuple[list[int], list[float]]:
    """Tokens and the gaps between the two best logits, by `transformers`."""
    import torch
    import transformers

    torch.set_num_threads(1)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens, gaps = list(ids), []
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
    return tokens[len(ids) :], gaps


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_it_and_greedy_text_is_clear_and_varied(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, family)
    tokenizer = Tokenizer.load(folder)
    tokens, gaps = greedy(folder, tokenizer.encode("Hello, world", True))
    assert len(set(tokens)) > NUM_TOKENS // 4
    assert sum(gap > 0.001 for gap in gaps) >= NUM_TOKENS - 2
    assert not {tokenizer.token_id(token) for token in SPECIAL_TOKENS} & set(tokens)
    others, _ = greedy(folder, tokenizer.encode("Jello, world", True))
    assert others != tokens


def test_a_model_can_be_made_that_ends_at_once(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, always_ends=True)
    tokens, _ = greedy(folder, [1, 2, 3])
    assert set(tokens) == {Tokenizer.load(folder).token_id("<|im_end|>")}


def test_transformers_tokenizer_agrees(tiny: Path) -> None:
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(tiny)
    text = "the thing ünd 敏捷 🙂<|im_end|>\n"
    assert Tokenizer.load(tiny).encode(text, True) == theirs(text).input_ids
    messages = [{"role": "user", "content": "hi"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_equal_arguments_give_equal_bytes_and_in_a_moment(tmp_path: Path) -> None:
    begin = time.monotonic()
    first, second = (make_tiny_model(tmp_path / name, "mixtral", seed=3) for name in ("first", "second"))
    assert time.monotonic() - begin < 2.0
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="family must be one of llama"):
        make_tiny_model(tmp_path, "gpt2")
