"""The search for the default model's file."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvlease.models.errors import ModelUnavailable
from kvlease.models.progress import silent
from kvlease.models.wheel import Wheel, find_installed, obtain_gguf

CONTENT = b"GGUF" + bytes(range(256)) * 40
WHEEL = Wheel(
    requirement="kvlease-example-model==1.0",
    package="kvlease_example_model",
    file_name="kvlease_example_model-1.0-py3-none-any.whl",
    page="https://example.invalid/files",
    num_bytes=11_000,
    gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
)
METADATA = """Metadata-Version: 2.1
Name: kvlease-example-model
Version: 1.0
Requires-Dist: kvlease-something-that-compiles
"""


def write_wheel(folder: Path, content: bytes | None = CONTENT) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / WHEEL.file_name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        if content is not None:
            archive.writestr(f"{WHEEL.package}/model.gguf", content)
        information = f"{WHEEL.package}-1.0.dist-info"
        archive.writestr(f"{information}/METADATA", METADATA)
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return path


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    path = tmp_path / "scratch"
    path.mkdir()
    return path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """pip sees one folder and no index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    (tmp_path / "links").mkdir()
    return tmp_path / "links"


def test_pip_brings_the_wheel_alone_and_progress_ends_whole(offline: Path, scratch: Path, tmp_path: Path) -> None:
    write_wheel(offline)
    seen: list[tuple[str, int, int]] = []
    path = obtain_gguf(WHEEL, tmp_path, scratch, lambda *each: seen.append(each))
    assert path.read_bytes() == CONTENT
    assert path.parent == scratch
    assert seen[0] == ("fetching kvlease-example-model==1.0", 0, WHEEL.num_bytes)
    assert seen[-1] == ("fetching kvlease-example-model==1.0", WHEEL.num_bytes, WHEEL.num_bytes)


@pytest.mark.usefixtures("offline")
def test_without_a_network_one_line_says_what_to_put_where(scratch: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        obtain_gguf(WHEEL, tmp_path, scratch, silent)
    message = str(caught.value)
    assert "\n" not in message
    for needed in (WHEEL.file_name, WHEEL.page, str(tmp_path), "No matching distribution"):
        assert needed in message


@pytest.mark.usefixtures("offline")
def test_a_wheel_put_there_by_hand_needs_no_network(scratch: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path)
    assert obtain_gguf(WHEEL, tmp_path, scratch, silent).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "reason"),
    [(CONTENT + b"x", "does not hold the expected model"), (None, "holds no GGUF file"), (b"", "is broken")],
)
def test_a_wrong_wheel_is_named(scratch: Path, tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = write_wheel(tmp_path, content)
    if content == b"":
        path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(ModelUnavailable, match=reason) as caught:
        obtain_gguf(WHEEL, tmp_path, scratch, silent)
    assert str(path) in str(caught.value)


def test_an_installed_package_is_used_without_running_it(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / WHEEL.package
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('was run')")
    (package / "model.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path)
    assert obtain_gguf(WHEEL, tmp_path, scratch, silent) == package / "model.gguf"
    assert find_installed(replace(WHEEL, gguf_sha256="0" * 64)) is None
    assert find_installed(replace(WHEEL, package="kvlease_no_such_package")) is None
