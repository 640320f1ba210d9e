"""What is read from a model folder, and which models are refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlease.models.errors import ModelFolderInvalid, UnsupportedModel
from kvlease.models.facts import FAMILIES, ModelFacts
from kvlease.models.fingerprint import model_fingerprint
from kvlease.models.limits import Limits
from kvlease.models.tiny import END_TOKEN, make_tiny_model
from kvlease.models.tokenizer import Tokenizer


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def change(path: Path, **members: object) -> None:
    """Set members of a JSON file; `...` removes one."""
    content = json.loads(path.read_text()) | members
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def refusal(folder: Path, **members: object) -> str:
    change(folder / "config.json", **members)
    with pytest.raises(UnsupportedModel) as caught:
        ModelFacts.read(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read(family: str, tmp_path: Path) -> None:
    facts = ModelFacts.read(make_tiny_model(tmp_path / family, family, context_length=128, layers=3))
    assert (facts.name, facts.family, facts.context_length, facts.dtype) == (family, family, 128, "float32")
    assert (facts.num_layers, facts.num_kv_heads, facts.head_dim, facts.vocab_size) == (3, 2, 16, 300)
    assert len(facts.fingerprint) == 16


def test_what_a_configuration_leaves_out_has_the_familys_default(folder: Path) -> None:
    change(folder / "config.json", head_dim=..., num_key_value_heads=None, dtype=..., torch_dtype="bfloat16")
    facts = ModelFacts.read(folder)
    assert (facts.head_dim, facts.num_kv_heads, facts.dtype) == (16, 4, "bfloat16")


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"model_type": "mistral", "sliding_window": 256}, "sliding window of 256 tokens in a context of 1024"),
        ({"model_type": "mistral", "sliding_window": ..., "max_position_embeddings": 8192}, "sliding window of 4096"),
        ({"model_type": "mixtral", "sliding_window": 256}, "sliding window"),
        (
            {"model_type": "qwen2", "sliding_window": 256, "use_sliding_window": True, "max_window_layers": 1},
            "sliding window",
        ),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"model_type": "llama", "layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"model_type": "deepseek_v2", "kv_lora_rank": 512}, "multi-head latent attention"),
        ({"model_type": "mamba", "state_size": 16}, "state space"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention"]}, "linear_attention"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported are llama"),
        ({"model_type": ...}, "None is not supported"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized with 'gptq'"),
    ],
)
def test_a_model_that_needs_more_is_refused_by_name(folder: Path, members: dict[str, Any], reason: str) -> None:
    assert reason in refusal(folder, **members)


@pytest.mark.parametrize(
    "members",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 1024},
        {"model_type": "qwen2", "sliding_window": 256, "use_sliding_window": False},
        {"model_type": "qwen2", "sliding_window": 256, "use_sliding_window": True, "max_window_layers": 2},
        {
            "model_type": "qwen3",
            "sliding_window": 256,
            "use_sliding_window": True,
            "max_window_layers": 0,
            "layer_types": ["full_attention"] * 2,
        },
        {"model_type": "llama", "sliding_window": 256},
    ],
)
def test_a_window_that_never_slides_is_no_obstacle(folder: Path, members: dict[str, Any]) -> None:
    change(folder / "config.json", **members)
    assert ModelFacts.read(folder).family == members["model_type"]


def test_end_tokens_are_the_union_of_all_four_sources(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[7, 8])
    change(folder / "config.json", eos_token_id=9)
    change(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    tokenizer = Tokenizer.load(folder)
    turn_end, tokenizer_end = tokenizer.token_id(END_TOKEN), tokenizer.token_id("<|endoftext|>")
    assert ModelFacts.read(folder).end_token_ids == {7, 8, 9, turn_end, tokenizer_end}


def test_a_turn_end_that_the_template_does_not_write_is_none(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=5)
    change(folder / "config.json", eos_token_id=...)
    change(folder / "tokenizer_config.json", eos_token=...)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert ModelFacts.read(folder).end_token_ids == {5}


def test_optional_files_may_be_missing_and_needed_ones_are_named(folder: Path) -> None:
    for name in ("generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    assert ModelFacts.read(folder).end_token_ids
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        (folder / name).unlink()
        with pytest.raises(ModelFolderInvalid, match=name):
            ModelFacts.read(folder)


@pytest.mark.parametrize("value", [0, -1, "2", None, True, 1.5])
def test_a_configuration_with_senseless_numbers_is_refused(folder: Path, value: object) -> None:
    change(folder / "config.json", num_hidden_layers=value)
    with pytest.raises(ModelFolderInvalid, match="num_hidden_layers"):
        ModelFacts.read(folder)


def test_the_fingerprint_knows_the_model_and_not_its_place(folder: Path, tiny: Path, tmp_path: Path) -> None:
    original = ModelFacts.read(tiny).fingerprint
    change(folder / "config.json", _name_or_path="elsewhere", transformers_version="9")
    assert ModelFacts.read(folder).fingerprint == original
    assert ModelFacts.read(make_tiny_model(tmp_path / "again")).fingerprint == original
    assert ModelFacts.read(make_tiny_model(tmp_path / "other", seed=1)).fingerprint != original


@pytest.mark.parametrize("where", [9, 40_000, -1])
def test_one_changed_weight_changes_the_fingerprint(folder: Path, where: int) -> None:
    configuration: dict[str, Any] = {}
    before = model_fingerprint(folder, configuration)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[where if where != 9 else content.index(b"pt")] ^= 1
    path.write_bytes(content)
    assert model_fingerprint(folder, configuration) != before


def test_configuration_and_tokenizer_are_under_the_fingerprint(folder: Path) -> None:
    prints = {model_fingerprint(folder, {}), model_fingerprint(folder, {"rope_theta": 1.0})}
    change(folder / "tokenizer.json", version="1.1")
    prints.add(model_fingerprint(folder, {}))
    assert len(prints) == 3


def test_large_weights_are_sampled_from_end_to_end(folder: Path) -> None:
    limits = Limits(whole_hash_bytes=1000, num_hash_samples=4, hash_sample_bytes=64)
    before = model_fingerprint(folder, {}, limits)
    assert before == model_fingerprint(folder, {}, limits)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert model_fingerprint(folder, {}, limits) != before


def test_between_the_samples_nothing_is_read(folder: Path) -> None:
    limits = Limits(whole_hash_bytes=1000, num_hash_samples=2, hash_sample_bytes=64)
    before = model_fingerprint(folder, {}, limits)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert model_fingerprint(folder, {}, limits) == before


def test_a_header_larger_than_the_file_is_not_even_read(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelFolderInvalid, match="not a whole safetensors file"):
        model_fingerprint(folder, {})


def test_the_whole_header_counts_even_between_the_samples(folder: Path) -> None:
    limits = Limits(whole_hash_bytes=1000, num_hash_samples=2, hash_sample_bytes=64)
    before = model_fingerprint(folder, {}, limits)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"layers.1.mlp.up_proj", b"layers.2.mlp.up_proj", 1))
    assert model_fingerprint(folder, {}, limits) != before


@pytest.mark.parametrize("num_bytes", [0, 7, 100, 100_000])
def test_a_cut_weights_file_is_refused(folder: Path, num_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelFolderInvalid, match=r"model\.safetensors"):
        ModelFacts.read(folder)


def test_nothing_here_loads_torch() -> None:
    program = (
        "import sys, pkgutil, importlib, kvlease.models as package\n"
        "for module in pkgutil.iter_modules(package.__path__): importlib.import_module('kvlease.models.' + module.name)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
