"""GGUF files to model folders."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from kvlease.models.chat_template import ChatTemplate
from kvlease.models.convert import STEPS, refuse_what_would_be_lost
from kvlease.models.errors import ModelUnavailable, UnsupportedModel
from kvlease.models.facts import ModelFacts
from kvlease.models.fetch import prepare_model
from kvlease.models.files import read_json
from kvlease.models.tiny import CHAT_TEMPLATE
from kvlease.models.tokenizer import Tokenizer

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_gguf(path: Path, folder: Path, *, rope_factors: bool = False, **changes: Any) -> Path:
    """The tiny Llama of `folder` as GGUF; `changes` are more metadata, dots written as two underscores."""
    import gguf

    configuration, tokenizer = read_json(folder / "config.json"), read_json(folder / "tokenizer.json")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(configuration["num_hidden_layers"])
    writer.add_context_length(configuration["max_position_embeddings"])
    writer.add_embedding_length(configuration["hidden_size"])
    writer.add_feed_forward_length(configuration["intermediate_size"])
    writer.add_head_count(configuration["num_attention_heads"])
    writer.add_head_count_kv(configuration["num_key_value_heads"])
    writer.add_rope_dimension_count(configuration["head_dim"])
    writer.add_rope_freq_base(configuration["rope_theta"])
    writer.add_layer_norm_rms_eps(configuration["rms_norm_eps"])
    writer.add_vocab_size(configuration["vocab_size"])
    _add_tokenizer(writer, tokenizer)
    for key, value in changes.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key.replace("__", "."), value)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.ones(configuration["head_dim"] // 2, dtype=np.float32))
    for name, weight in _gguf_weights(folder, configuration):
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any]) -> None:
    special = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"] | special, key=(tokenizer["model"]["vocab"] | special).__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(special["<|im_start|>"])
    writer.add_eos_token_id(special["<|im_end|>"])
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_weights(folder: Path, configuration: dict[str, Any]) -> list[tuple[str, npt.NDArray[np.float32]]]:
    weights = load_file(folder / "model.safetensors")
    named = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    for layer in range(configuration["num_hidden_layers"]):
        for theirs, ours in _BLOCK_NAMES.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                weight = _interleaved(weight, configuration["head_dim"])
            named[f"blk.{layer}.{theirs}.weight"] = weight
    return list(named.items())


def _interleaved(weight: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Rows as GGUF's Llama has them: the two halves that rotate together lie beside each other."""
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def test_a_gguf_file_becomes_the_same_model_once(tiny: Path, tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "tiny llama.gguf", tiny)
    seen: list[tuple[str, int, int]] = []
    folder = prepare_model(str(gguf), tmp_path / "cache", lambda *each: seen.append(each))
    assert seen[-1] == ("converting tiny llama.gguf", len(STEPS), len(STEPS))
    original, converted = (load_file(each / "model.safetensors") for each in (tiny, folder))
    assert original.keys() == converted.keys()
    assert all(np.array_equal(original[name], converted[name]) for name in original)
    before, after = ModelFacts.read(tiny), ModelFacts.read(folder)
    assert (before.context_length, before.head_dim, before.end_token_ids) == (
        after.context_length,
        after.head_dim,
        after.end_token_ids,
    )
    text = "the thing ünd 敏捷 🙂<|im_end|>\n"
    ours, theirs = Tokenizer.load(folder), Tokenizer.load(tiny)
    assert ours.encode(text, False) == theirs.encode(text, False)
    assert ours.encode(text, True) == [theirs.token_id("<|im_start|>"), *theirs.encode(text, False)]
    template = ChatTemplate.load(folder)
    assert template is not None
    assert template.source.strip() == CHAT_TEMPLATE.strip()
    num_calls = len(seen)
    assert prepare_model(str(gguf), tmp_path / "cache", lambda *each: seen.append(each)) == folder
    assert len(seen) == num_calls


def test_a_file_that_is_no_gguf_fails_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelUnavailable, match=r"broken\.gguf cannot be converted: .") as caught:
        prepare_model(str(gguf), tmp_path / "cache", lambda *_: None)
    assert "\n" not in str(caught.value)
    assert all(path.suffix == ".lock" for path in (tmp_path / "cache" / "models").iterdir())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"llama__rope__scaling__type": "yarn"}, "rotary positions"),
        ({"llama__expert_count": 4}, "mixture of experts"),
        ({"rope_factors": True}, "rotary factors"),
    ],
)
def test_what_a_conversion_would_lose_is_refused(
    tiny: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        refuse_what_would_be_lost(write_gguf(tmp_path / "x.gguf", tiny, **changes))


def test_what_a_conversion_keeps_is_not_refused(tiny: Path, tmp_path: Path) -> None:
    refuse_what_would_be_lost(write_gguf(tmp_path / "x.gguf", tiny, llama__rope__scaling__type="none"))
