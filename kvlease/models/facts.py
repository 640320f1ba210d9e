"""What the servers must know of a model before they load it.

Owns the reading of a folder's configuration and the refusal of models whose attention needs more than the engine has.

Never: loads weights, or imports torch or transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from kvlease.models.chat_template import find_template, special_tokens
from kvlease.models.errors import ModelFolderInvalid, UnsupportedModel
from kvlease.models.files import read_json
from kvlease.models.fingerprint import model_fingerprint


@dataclass(frozen=True, slots=True)
class Family:
    """What a configuration means when it leaves something out: the defaults of the family's own definition."""

    num_kv_heads: int | None = None  # None: as many as there are attention heads
    head_dim: int | None = None  # None: hidden size over attention heads
    sliding_window: int | None = None
    slides: str = (
        "never"  # 'never': the attention has no window; 'always': when one is set; 'on_request': a switch as well
    )


FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(),
    "mistral": Family(num_kv_heads=8, sliding_window=4096, slides="always"),
    "mixtral": Family(num_kv_heads=8, slides="always"),
    "qwen2": Family(num_kv_heads=32, sliding_window=4096, slides="on_request"),
    "qwen3": Family(num_kv_heads=32, head_dim=128, sliding_window=4096, slides="on_request"),
}

#: Tokens that end a turn in the templates of these families; one counts only where the template itself writes it.
_TURN_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|eot|>", "</s>")

_DTYPES: Final = frozenset(("float32", "bfloat16", "float16"))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of one model folder; `context_length` in tokens, `dtype` as the weights are stored."""

    name: str
    family: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    dtype: str
    end_token_ids: frozenset[int]
    fingerprint: bytes  # 16 bytes: configuration, weights and tokenizer

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a folder; raises UnsupportedModel naming why, or ModelFolderInvalid naming the file."""
        configuration = read_json(folder / "config.json")
        family_name = supported_family(configuration)
        family = FAMILIES[family_name]
        num_heads = _count(configuration, "num_attention_heads")
        vocab_size = _count(configuration, "vocab_size")
        return cls(
            name=folder.resolve().name,
            family=family_name,
            vocab_size=vocab_size,
            num_layers=_count(configuration, "num_hidden_layers"),
            num_kv_heads=_count(configuration, "num_key_value_heads", family.num_kv_heads or num_heads),
            head_dim=_count(
                configuration, "head_dim", family.head_dim or _count(configuration, "hidden_size") // num_heads
            ),
            context_length=_count(configuration, "max_position_embeddings"),
            dtype=_dtype(configuration),
            end_token_ids=_end_token_ids(folder, configuration, vocab_size),
            fingerprint=model_fingerprint(folder, configuration),
        )


def supported_family(configuration: Mapping[str, Any]) -> str:
    """The family of a configuration that the engine can run; raises UnsupportedModel with one line otherwise."""
    name = configuration.get("model_type")
    if configuration.get("is_encoder_decoder"):
        raise UnsupportedModel(f"model type {name!r} is an encoder-decoder; only decoders are supported")
    if configuration.get("kv_lora_rank"):
        raise UnsupportedModel(
            f"model type {name!r} uses multi-head latent attention (kv_lora_rank), which is not supported"
        )
    if reason := _state_space(configuration):
        raise UnsupportedModel(
            f"model type {name!r} uses state space or linear attention ({reason}), which is not supported"
        )
    if name not in FAMILIES:
        raise UnsupportedModel(f"model type {name!r} is not supported; supported are {', '.join(FAMILIES)}")
    if quantization := configuration.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModel(f"the weights are quantized with {method!r}, which is not supported")
    _refuse_sliding_window(str(name), configuration)
    return str(name)


def _state_space(configuration: Mapping[str, Any]) -> str | None:
    signs = ("ssm_cfg", "ssm_state_size", "state_size", "mamba_d_state", "time_mix_extra_dim", "linear_num_value_heads")
    for sign in signs:
        if configuration.get(sign):
            return sign
    for kind in _layer_types(configuration):
        if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
            return f"layer type {kind!r}"
    return None


def _refuse_sliding_window(name: str, configuration: Mapping[str, Any]) -> None:
    for kind in ("sliding_attention", "chunked_attention"):
        if kind in _layer_types(configuration):
            raise UnsupportedModel(
                f"model type {name!r} has layers of type {kind!r}: an active sliding window is not supported"
            )
    family = FAMILIES[name]
    window = configuration.get("sliding_window", family.sliding_window)
    if family.slides == "never" or window is None:
        return
    if family.slides == "on_request" and not _window_requested(configuration):
        return
    context_length = _count(configuration, "max_position_embeddings")
    if window < context_length:
        raise UnsupportedModel(
            f"model type {name!r} has an active sliding window of {window} tokens in a context of {context_length}, "
            "which is not supported"
        )


def _window_requested(configuration: Mapping[str, Any]) -> bool:
    """Qwen's switch; the window begins at layer `max_window_layers`, and explicit layer types have the last word."""
    if not configuration.get("use_sliding_window", False) or _layer_types(configuration):
        return False
    return int(configuration.get("max_window_layers", 28)) < _count(configuration, "num_hidden_layers")


def _layer_types(configuration: Mapping[str, Any]) -> list[str]:
    kinds = configuration.get("layer_types")
    return [str(kind) for kind in kinds] if isinstance(kinds, list) else []


def _count(configuration: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = configuration.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelFolderInvalid(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _dtype(configuration: Mapping[str, Any]) -> str:
    name = configuration.get("dtype") or configuration.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise UnsupportedModel(
            f"config.json: dtype {name!r} is not supported; supported are {', '.join(sorted(_DTYPES))}"
        )
    return str(name)


def _end_token_ids(folder: Path, configuration: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """Every token that ends a text: of the generation config, the config, the tokenizer and the chat template."""
    tokenizer_configuration = read_json(folder / "tokenizer_config.json", missing={})
    template = find_template(folder, tokenizer_configuration) or ""
    spellings = {token for token in _TURN_ENDS if token in template}
    if (token := special_tokens(tokenizer_configuration).get("eos_token")) is not None:
        spellings.add(token)
    generation = read_json(folder / "generation_config.json", missing={})
    ids = set(_ids(generation.get("eos_token_id"))) | set(_ids(configuration.get("eos_token_id")))
    ids |= _ids_of(spellings, read_json(folder / "tokenizer.json"))
    return frozenset(token_id for token_id in ids if 0 <= token_id < vocab_size)


def _ids(value: object) -> Iterable[int]:
    members = value if isinstance(value, list) else [value]
    return [member for member in members if isinstance(member, int) and not isinstance(member, bool)]


def _ids_of(spellings: set[str], tokenizer: Mapping[str, Any]) -> set[int]:
    added = {
        entry.get("content"): entry.get("id")
        for entry in tokenizer.get("added_tokens") or ()
        if isinstance(entry, dict)
    }
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    plain = vocabulary if isinstance(vocabulary, dict) else {}
    return {token_id for text in spellings if isinstance(token_id := added.get(text, plain.get(text)), int)}
