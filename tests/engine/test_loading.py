"""What a server's start can meet."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvlease.engine.errors import UnsupportedDevice, UnsupportedDtype, UnsupportedFeature, WeightsInvalid
from kvlease.engine.loading import load_model, resolve_dtype
from kvlease.engine.runner import ModelRunner

FolderOf = Callable[[str], Path]


@pytest.fixture
def folder(folder_of: FolderOf, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(folder_of("llama"), tmp_path / "model"))


def load(folder: Path, dtype: str = "auto", device: str = "cpu") -> ModelRunner:
    return ModelRunner.load(folder, dtype=dtype, device=device, num_blocks=2, block_size=16)


def test_auto_is_float32_on_a_cpu(folder: Path) -> None:
    assert resolve_dtype("auto", "cpu") == "float32"
    assert load(folder).dtype == "float32"


@pytest.mark.parametrize("dtype", ["float16", "int8", ""])
def test_an_unknown_dtype_is_refused(folder: Path, dtype: str) -> None:
    with pytest.raises(UnsupportedDtype, match="choose auto, float32 or bfloat16"):
        load(folder, dtype)


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99"])
def test_a_device_that_is_unknown_or_absent_is_refused(folder: Path, device: str) -> None:
    with pytest.raises(UnsupportedDevice, match=device):
        load(folder, device=device)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_batch_are_refused(folder: Path, rope_type: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    factors = [1.0] * (config["head_dim"] // 2)
    config["rope_scaling"] = {
        "rope_type": rope_type, "factor": 2.0, "short_factor": factors, "long_factor": factors,
        "original_max_position_embeddings": 512,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFeature, match=rope_type):
        load(folder)


def test_a_missing_weight_is_refused_by_name(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsInvalid, match=r"missing, first .*layers\.1\.mlp\.up_proj"):
        load(folder)


def spoil_a_shape(folder: Path) -> Path:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_weight_of_the_wrong_shape_is_refused(folder: Path) -> None:
    spoil_a_shape(folder)
    with pytest.raises(WeightsInvalid, match=r"wrong shape, first .*norm"):
        load(folder)


def test_a_weight_without_a_place_is_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsInvalid, match=r"no place in the model, first .*q_proj\.bias"):
        load(folder)


def test_a_file_cut_short_is_refused(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightsInvalid):
        load_model(folder, "llama", "float32", torch.device("cpu"))


def test_loading_is_silent_in_success_and_failure_and_needs_neither_network_nor_other_models(
    folder: Path, folder_of: FolderOf
) -> None:
    spoil_a_shape(folder)
    program = f"""
import socket, sys
def refuse(*args, **kwargs): raise AssertionError("the network was used")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
from pathlib import Path
from kvlease.engine.threads import prepare_environment, set_threads
prepare_environment(1)
set_threads(1)
from kvlease.engine.runner import ModelRunner
ModelRunner.load(Path({str(folder_of("llama"))!r}), dtype="auto", device="cpu", num_blocks=2, block_size=16)
from kvlease.engine.errors import WeightsInvalid
try:
    ModelRunner.load(Path({str(folder)!r}), dtype="auto", device="cpu", num_blocks=2, block_size=16)
except WeightsInvalid:
    pass
else:
    raise AssertionError("spoiled weights were loaded")
import torch
assert (torch.get_num_threads(), torch.get_num_interop_threads()) == (1, 1)
print(*sorted(name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    # The table of model names comes along; the definitions themselves do not.
    assert set(done.stdout.split()) - {"transformers.models.auto.modeling_auto"} == {
        "transformers.models.llama.modeling_llama"
    }
