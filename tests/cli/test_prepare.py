from __future__ import annotations

from pathlib import Path

import pytest

from kvlease.cli.main import main
from kvlease.models.tiny import make_tiny_model


def test_prepare_prints_the_folder_that_servers_will_find(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    assert main(["prepare", "--model", str(folder), "--cache", str(tmp_path / "cache")]) == 0
    assert capsys.readouterr().out == f"{folder}\n"


def test_a_model_that_cannot_be_prepared_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", "--model", str(tmp_path / "nothing"), "--cache", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "--model" in output.err
