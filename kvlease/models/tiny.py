"""Tiny seeded model folders, for tests and demonstrations without a download.

Owns a whole folder of a few hundred kilobytes: configuration, random weights, a byte-level tokenizer and a ChatML
template. The text is noise, but everything else is as with a real model: the folder loads in `transformers`, greedy
choices are clear, and the same arguments give the same bytes.

Never: imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tokenizers
from safetensors.numpy import save_file

Array = npt.NDArray[np.float32]

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")
END_TOKEN: Final = "<|im_end|>"  # noqa: S105 - no password
#: Merged pairs of the vocabulary: 256 bytes, these and the special tokens make 300.
_MERGES: Final = (
    *("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of", "ed", "is", "it", "al"),
    *("ar", "st", "to", "nt", "ng", "se", "ha", "as", "ou", "io", "le", "ve", "co", "me", "de", "hi", "ri", "ro", "ic"),
    *("ne", "ea"),
)
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
}


@dataclass(frozen=True, slots=True)
class TinyShape:
    """The sizes of a tiny model; small, and with fewer KV heads than heads as real ones have."""

    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 96
    num_experts: int = 4  # mixtral only
    num_active_experts: int = 2


def make_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    context_length: int = 1024,
    layers: int = 2,
    always_ends: bool = False,
) -> Path:
    """Write a model of `family` into `folder` (made if need be) and return it; ValueError for an unknown family.

    It never chooses a special token, so an answer has as many tokens as were asked for; with `always_ends` it chooses
    nothing but the end token.
    """
    if family not in _ARCHITECTURES:
        raise ValueError(f"family must be one of {', '.join(_ARCHITECTURES)}, got {family!r}")
    shape = TinyShape(num_layers=layers)
    folder.mkdir(parents=True, exist_ok=True)
    backend = _tokenizer()
    vocab_size = backend.get_vocab_size()
    end_id = backend.token_to_id(END_TOKEN)
    assert end_id is not None
    backend.save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", _configuration(family, shape, vocab_size, context_length) | {"eos_token_id": end_id})
    _write(folder / "generation_config.json", {"eos_token_id": [end_id], "do_sample": False})
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_TOKEN, "pad_token": "<pad>"},
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    special_ids = [token_id for token in SPECIAL_TOKENS if (token_id := backend.token_to_id(token)) is not None]
    weights = _weights(np.random.default_rng(seed), family, shape, vocab_size)
    _steer(weights, special_ids, end_id if always_ends else None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*alphabet, *_MERGES))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in _MERGES]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return backend


def _configuration(family: str, shape: TinyShape, vocab_size: int, context_length: int) -> dict[str, Any]:
    content: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": context_length,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "sliding_window": None,
        "bos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
    }
    if family == "mixtral":
        content |= {"num_local_experts": shape.num_experts, "num_experts_per_tok": shape.num_active_experts}
    if family.startswith("qwen"):
        content |= {"use_sliding_window": False, "attention_bias": False}
    return content


def _weights(random: np.random.Generator, family: str, shape: TinyShape, vocab_size: int) -> dict[str, Array]:
    weights = {
        "model.embed_tokens.weight": _matrix(random, vocab_size, shape.hidden_size, scale=1.0),
        "model.norm.weight": _ones(shape.hidden_size),
        "lm_head.weight": _matrix(random, vocab_size, shape.hidden_size, scale=3.0 * shape.hidden_size**-0.5),
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = _ones(shape.hidden_size)
        weights |= {prefix + name: value for name, value in _attention(random, family, shape)}
        weights |= {prefix + name: value for name, value in _feed_forward(random, family, shape)}
    return weights


def _attention(random: np.random.Generator, family: str, shape: TinyShape) -> Iterator[tuple[str, Array]]:
    num_rows = {"q": shape.num_heads * shape.head_dim, "k": shape.num_kv_heads * shape.head_dim}
    num_rows["v"] = num_rows["k"]
    # Queries and keys are scaled up, so that attention picks out tokens instead of averaging over all of them.
    scales = {"q": 2.0, "k": 2.0, "v": 2.0}
    for part, rows in num_rows.items():
        yield f"self_attn.{part}_proj.weight", _projection(random, rows, shape.hidden_size, scales[part])
        if family == "qwen2":
            yield f"self_attn.{part}_proj.bias", _matrix(random, 1, rows, scale=0.5)[0].copy()
    yield "self_attn.o_proj.weight", _projection(random, shape.hidden_size, num_rows["q"], 2.0)
    if family == "qwen3":
        for norm in ("q_norm", "k_norm"):
            yield f"self_attn.{norm}.weight", _ones(shape.head_dim) * np.float32(1.5)


def _feed_forward(random: np.random.Generator, family: str, shape: TinyShape) -> Iterator[tuple[str, Array]]:
    if family != "mixtral":
        yield from _gated(random, shape, "mlp.", ("gate_proj", "up_proj", "down_proj"))
        return
    yield "block_sparse_moe.gate.weight", _projection(random, shape.num_experts, shape.hidden_size, 2.0)
    for expert in range(shape.num_experts):
        yield from _gated(random, shape, f"block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2"))


def _gated(
    random: np.random.Generator, shape: TinyShape, prefix: str, names: tuple[str, str, str]
) -> Iterator[tuple[str, Array]]:
    gate, up, down = names
    yield f"{prefix}{gate}.weight", _projection(random, shape.intermediate_size, shape.hidden_size, 1.5)
    yield f"{prefix}{up}.weight", _projection(random, shape.intermediate_size, shape.hidden_size, 1.5)
    yield f"{prefix}{down}.weight", _projection(random, shape.hidden_size, shape.intermediate_size, 1.5)


def _steer(weights: dict[str, Array], special_ids: list[int], forced_id: int | None) -> None:
    """Make hidden dimension 0 one positive number everywhere, and let the last layer use it as a bias per token."""
    weights["model.embed_tokens.weight"][:, 0] = 4.0
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
            value[0, :] = 0.0  # what layers add to dimension 0
    head = weights["lm_head.weight"]
    head[:, 0] = 0.0
    head[special_ids, :] = 0.0
    head[special_ids, 0] = -1000.0
    if forced_id is not None:
        head[forced_id, 0] = 1000.0


def _projection(random: np.random.Generator, rows: int, columns: int, gain: float) -> Array:
    return _matrix(random, rows, columns, scale=gain * columns**-0.5)


def _matrix(random: np.random.Generator, rows: int, columns: int, *, scale: float) -> Array:
    return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(scale)


def _ones(num: int) -> Array:
    return np.ones(num, dtype=np.float32)
