"""Getting a model's definition and weights from `transformers`, with our attention in its layers.

Never: reaches the network, writes to standard error, or holds a second copy of the weights.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from kvlease.engine.attention import ATTENTION_NAME, AttentionStep, register_attention
from kvlease.engine.errors import UnsupportedDevice, UnsupportedDtype, UnsupportedFeature, WeightsInvalid
from kvlease.models.files import weight_files

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES_IN_FILES = {"float32": "F32", "bfloat16": "BF16"}

#: The class of each family, looked up by name so that no other model's definition is imported.
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

#: These recompute their frequencies from the longest position of a pass, so a sequence's KV would depend on what shares its batch.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")

#: What of the loading report stops the start, and in which words.
_MISFITS = {
    "missing_keys": "are missing",
    "mismatched_keys": "have the wrong shape",
    "unexpected_keys": "have no place in the model",
}


class CausalOutput(Protocol):
    """What we use of a model's output."""

    logits: torch.Tensor


class CausalModel(Protocol):
    """What we use of a causal language model."""

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        use_cache: bool,
        logits_to_keep: torch.Tensor,
        attention_step: AttentionStep,
    ) -> CausalOutput:
        """`input_ids` and `position_ids` [1, num_tokens] -> logits [1, rows to keep, vocabulary]."""


def resolve_dtype(dtype: str, device: str) -> str:
    """'float32' or 'bfloat16' for a wish of one of these or 'auto'; raises `UnsupportedDtype`.

    On a CPU 'auto' is float32 even where bfloat16 would be fast: its text is the one that can be compared token by token.
    """
    if dtype == "auto":
        return "bfloat16" if torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    if dtype not in DTYPES:
        raise UnsupportedDtype(f"dtype {dtype!r} is not supported; choose auto, {' or '.join(DTYPES)}")
    return dtype


def resolve_device(device: str) -> torch.device:
    """The device of that name, present and supported; raises `UnsupportedDevice`."""
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise UnsupportedDevice(f"device {device!r} is unknown; choose cpu or cuda") from error
    if resolved.type not in ("cpu", "cuda"):
        raise UnsupportedDevice(f"device {device!r} is not supported; choose cpu or cuda")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise UnsupportedDevice(f"device {device!r} is not present: {torch.cuda.device_count()} CUDA devices found")
    return resolved


def load_model(folder: Path, family: str, dtype: str, device: torch.device) -> CausalModel:
    """The model of `folder`, on `device`, ready for inference; raises `UnsupportedFeature` or `WeightsInvalid`."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is first imported, which is why that happens below
    register_attention()
    model_class = _model_class(family)
    config = model_class.config_class.from_pretrained(folder, local_files_only=True)
    _refuse_batch_dependent_rope(config.rope_parameters)
    with _silence():
        try:
            cast_weights = _cast_weights(folder, dtype)
            model, report = model_class.from_pretrained(
                None if cast_weights else folder,
                config=config,
                state_dict=cast_weights,
                dtype=DTYPES[dtype],
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they are in the report, and refused by name
                output_loading_info=True,
            )
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise WeightsInvalid(f"{folder}: the weights cannot be loaded: {error}") from error
    _refuse_misfits(folder, report)
    return cast("CausalModel", model.eval().requires_grad_(False).to(device))


def _cast_weights(folder: Path, dtype: str) -> dict[str, torch.Tensor] | None:
    """The weights as `dtype` if the folder has them in another one; None: they can be mapped into memory as they are.

    A file is opened anew for each tensor: what was read of an open one stays resident, and all of it beside its copy is too much.
    """
    places = [(path, name) for path in weight_files(folder) for name in _names(path)]
    if all(_is_of(path, name, dtype) for path, name in places):
        return None
    weights = {}
    for path, name in places:
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(name)
            weights[name] = tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor
    return weights


def _names(path: Path) -> tuple[str, ...]:
    with safe_open(path, framework="pt") as file:
        return tuple(file.keys())


def _is_of(path: Path, name: str, dtype: str) -> bool:
    with safe_open(path, framework="pt") as file:
        found: str = file.get_slice(name).get_dtype()
    return found == _NAMES_IN_FILES[dtype]


def _model_class(family: str) -> type[Any]:  # its own annotations do not survive its decorators
    assert family in _CLASSES, f"family {family!r} should have been refused with its configuration"
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    model_class: type[Any] = getattr(module, _CLASSES[family])
    return model_class


def _refuse_misfits(folder: Path, report: dict[str, Collection[object]]) -> None:
    """A weight that is missing would be random, one without a place means that the configuration is another model's."""
    for kind, meaning in _MISFITS.items():
        if report[kind]:
            names = sorted(str(key) for key in report[kind])
            raise WeightsInvalid(f"{folder}: {len(names)} weights {meaning}, first {names[0]}")


def _refuse_batch_dependent_rope(parameters: dict[str, Any] | None) -> None:
    rope_type = (parameters or {}).get("rope_type", "default")
    if rope_type in _BATCH_DEPENDENT_ROPE:
        raise UnsupportedFeature(
            f"rope type {rope_type!r} changes with the longest sequence of a batch, which is not supported"
        )


@contextmanager
def _silence() -> Iterator[None]:
    """While open, `transformers` reports neither progress nor warnings; what matters is in the loading report."""
    from transformers.utils import logging  # noqa: PLC0415  as above

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
