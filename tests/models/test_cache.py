"""Folders that are made once."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlease.models.cache import cached_folder
from kvlease.models.manifest import MANIFEST, find_fault
from kvlease.models.progress import silent


class Builder:
    """Writes two small files and counts how often."""

    def __init__(self) -> None:
        self.num_builds = 0
        self.on_build: Callable[[], None] = lambda: None

    def __call__(self, target: Path, scratch: Path) -> None:
        self.num_builds += 1
        (scratch / "download").write_bytes(b"gone afterwards")
        (target / "one").write_bytes(b"1" * 3_000_000)
        self.on_build()
        (target / "two").write_text("2")


@pytest.fixture
def build() -> Builder:
    return Builder()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_folder_is_made_once_and_nothing_else_is_left(tmp_path: Path, build: Builder) -> None:
    place = tmp_path / "models" / "name"
    for _ in range(2):
        assert cached_folder(place, build, silent) == place
    assert build.num_builds == 1
    assert names(place) == {"one", "two", MANIFEST}
    assert names(place.parent) <= {"name", "name.lock"}


@pytest.mark.parametrize("file", ["one", "two", MANIFEST])
def test_a_missing_file_leads_to_a_new_folder(tmp_path: Path, build: Builder, file: str) -> None:
    place = cached_folder(tmp_path / "name", build, silent)
    (place / file).unlink()
    assert find_fault(place) is not None
    cached_folder(place, build, silent)
    assert build.num_builds == 2
    assert find_fault(place) is None


@pytest.mark.parametrize("content", [b"1" * 2_999_999 + b"2", b"1" * 2_999_999, b""])
def test_a_damaged_file_leads_to_a_new_folder(tmp_path: Path, build: Builder, content: bytes) -> None:
    place = cached_folder(tmp_path / "name", build, silent)
    (place / "one").write_bytes(content)
    cached_folder(place, build, silent)
    assert (build.num_builds, (place / "one").read_bytes()) == (2, b"1" * 3_000_000)


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[]",
        "{}",
        '{"conversion_version": 1, "files": {"one": 5}}',
        '{"conversion_version": 0, "files": {"two": {}}}',
    ],
)
def test_a_senseless_manifest_is_a_fault(tmp_path: Path, build: Builder, manifest: str) -> None:
    place = cached_folder(tmp_path / "name", build, silent)
    (place / MANIFEST).write_text(manifest)
    assert find_fault(place) is not None


def test_a_folder_of_another_conversion_is_a_fault(tmp_path: Path, build: Builder) -> None:
    place = cached_folder(tmp_path / "name", build, silent)
    manifest = place / MANIFEST
    manifest.write_text(manifest.read_text().replace('"conversion_version": ', '"conversion_version": 1'))
    assert "another version" in (find_fault(place) or "")


def test_a_failed_build_leaves_nothing(tmp_path: Path, build: Builder) -> None:
    def fail() -> None:
        raise InterruptedError

    build.on_build = fail
    with pytest.raises(InterruptedError):
        cached_folder(tmp_path / "name", build, silent)
    assert names(tmp_path) <= {"name.lock"}


def test_the_rests_of_a_killed_build_are_swept(tmp_path: Path, build: Builder) -> None:
    rest, neighbour = tmp_path / ".name.abcd" / "target", tmp_path / ".names.abcd"
    rest.mkdir(parents=True)
    neighbour.mkdir()
    cached_folder(tmp_path / "name", build, silent)
    assert not rest.parent.exists()
    assert neighbour.exists()


def test_those_who_come_meanwhile_wait_and_get_the_same_folder(tmp_path: Path, build: Builder) -> None:
    place = tmp_path / "name"
    waiting = threading.Event()
    stages: list[str] = []

    def tell(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        waiting.set()

    other = threading.Thread(target=cached_folder, args=(place, build, tell))
    seen: list[bool] = []

    def meanwhile() -> None:
        other.start()
        seen.append(waiting.wait(10) and not place.exists())

    build.on_build = meanwhile
    cached_folder(place, build, silent)
    other.join(10)
    assert seen == [True]
    assert build.num_builds == 1
    assert stages == ["waiting for another process that prepares name"]
