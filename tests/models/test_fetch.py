"""From what the user names to a folder."""

import shutil
from pathlib import Path

import pytest

from kvlease.models.errors import ModelFolderInvalid, ModelUnavailable, ModelUnknown, UnsupportedModel
from kvlease.models.fetch import DEFAULT_MODEL, default_cache_dir, prepare_model
from kvlease.models.progress import silent


def test_a_folder_is_used_as_it_is(tiny: Path, tmp_path: Path) -> None:
    assert prepare_model(str(tiny), tmp_path / "cache", silent) == tiny
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file_is_refused_by_its_name(tiny: Path, tmp_path: Path, file: str) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "copy"))
    (folder / file).unlink()
    with pytest.raises(ModelFolderInvalid, match=f"{file} is missing"):
        prepare_model(str(folder), tmp_path, silent)


def test_older_forms_of_a_folder_are_recognised(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "copy"))
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(ModelFolderInvalid, match="can be turned into it by transformers"):
        prepare_model(str(folder), tmp_path, silent)
    (folder / "tokenizer.model").rename(folder / "tokenizer.json")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFolderInvalid, match="save them as safetensors"):
        prepare_model(str(folder), tmp_path, silent)


def test_shards_must_all_be_there_and_inside(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "copy"))
    index = folder / "model.safetensors.index.json"
    for shard, reason in (("b.safetensors", "b.safetensors is missing"), ("../b.safetensors", "outside the folder")):
        index.write_text(f'{{"weight_map": {{"x": "model.safetensors", "y": "{shard}"}}}}')
        with pytest.raises(ModelFolderInvalid, match=reason):
            prepare_model(str(folder), tmp_path, silent)


def test_a_folder_that_cannot_be_served_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UnsupportedModel, match="gpt2"):
        prepare_model(str(tmp_path), tmp_path, silent)


@pytest.mark.parametrize("name", ["no-such-model", "", "missing.gguf", __file__])
def test_an_unknown_name_says_what_there_is(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelUnknown, match=DEFAULT_MODEL):
        prepare_model(name or "/dev/null", tmp_path, silent)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file in its place")
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ModelUnavailable, match="cannot be prepared in") as caught:
        prepare_model(str(gguf), tmp_path, silent)
    assert "\n" not in str(caught.value)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("KVLEASE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path("/h/.cache/kvlease")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_dir() == Path("/x/kvlease")
    monkeypatch.setenv("KVLEASE_CACHE", "~/k")
    assert default_cache_dir() == Path("/h/k")
