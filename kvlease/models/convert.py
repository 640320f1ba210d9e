"""A GGUF file to a model folder: `python -m kvlease.models.convert FILE.gguf FOLDER`.

Owns the conversion, which needs torch, `transformers` and the whole model in memory: it is a program of its own, so that
whoever wants a folder never holds them. Weights become float32. Each finished step is a line on standard output; a failure is
one line on standard error.

Never: imported by another module of the project, or leaves out a weight in silence.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvlease.models.errors import ModelUnusable, UnsupportedModel
from kvlease.models.facts import supported_family

if TYPE_CHECKING:
    import gguf

STEPS: Final = ("read", "tokenizer", "weights", "written")


def convert(source: Path, target: Path) -> None:
    """Write `source` as safetensors with tokenizer and template into `target`; raises ModelUnusable."""
    import transformers  # noqa: PLC0415 - dear to import, and wanted only here

    refuse_what_would_be_lost(source)
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    supported_family(transformers.AutoConfig.from_pretrained(**place).to_dict())
    _done("read")
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    _done("tokenizer")
    _write_weights(place, target)
    tokenizer.save_pretrained(target)
    for path in target.iterdir():
        path.chmod(0o644)  # safetensors makes its files private
    _done("written")


def refuse_what_would_be_lost(source: Path) -> None:
    """Refuse a GGUF file that says something about the model that the loader does not carry over."""
    import gguf  # noqa: PLC0415 - reads the whole metadata; the program alone needs it

    reader = gguf.GGUFReader(source)
    architecture = _field(reader, "general.architecture")
    if _field(reader, f"{architecture}.rope.scaling.type") not in (None, "none"):
        raise UnsupportedModel(f"{source} scales its rotary positions, which is lost in a conversion: use safetensors")
    if any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise UnsupportedModel(f"{source} has rotary factors, which are lost in a conversion: use safetensors")
    if architecture == "llama" and _field(reader, "llama.expert_count"):
        raise UnsupportedModel(f"{source} holds a mixture of experts, which cannot be converted: use safetensors")


def _field(reader: gguf.GGUFReader, name: str) -> object:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _write_weights(place: dict[str, Any], target: Path) -> None:
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(**place, dtype=torch.float32, output_loading_info=True)
    lost: Iterable[str] = (*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"])
    if names := sorted(map(str, lost)):
        raise UnsupportedModel(f"{place['gguf_file']} does not fit its architecture: {', '.join(names[:3])}")
    # The loader remembers that the weights were quantized once and then refuses to save them; they no longer are.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _done("weights")
    model.save_pretrained(target)


def _done(step: str) -> None:
    assert step in STEPS
    sys.stdout.write(f"{step}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Convert; the exit status."""
    source, target = map(Path, arguments)
    try:
        convert(source, target)
    except (ModelUnusable, OSError, ValueError, LookupError, RuntimeError, ImportError, AttributeError) as error:
        sys.stderr.write(" ".join(str(error).split())[:500] + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
