"""What the container files promise, read from them: no engine is needed."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from kvlease.cli.options import from_process
from kvlease.cli.settings import ENV_PREFIX, Settings
from kvlease.models.wheel import SMOLLM2

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVERS = ("gateway", "prefill-0", "prefill-1", "decode-0", "decode-1")
OVERLAYS = ("compose.yaml", "compose.rdma.yaml")


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return document


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = load("compose.yaml")["services"]
    return found


def filled_in(text: str) -> str:
    """${NAME:-default} as compose fills it in where nothing is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def environment(name: str) -> dict[str, str]:
    return {key: filled_in(str(value)) for key, value in services()[name]["environment"].items()}


def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text()


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)


def test_the_cluster_is_a_gateway_two_prefill_two_decode_and_a_model() -> None:
    assert set(services()) == {"model", *SERVERS}


@pytest.mark.parametrize("name", ["model", *SERVERS])
def test_a_container_can_do_as_little_as_possible(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "cap_add" not in service
    assert "privileged" not in service
    assert service["pids_limit"] <= 512
    assert all("size=" in mount and "noexec" in mount for mount in service["tmpfs"])


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_mounts_nothing_that_it_can_write(name: str) -> None:
    assert services()[name]["volumes"] == ["models:/models:ro"]


def test_the_one_that_writes_the_model_has_no_network() -> None:
    assert services()["model"]["network_mode"] == "none"
    assert all(services()[name]["depends_on"]["model"]["condition"].endswith("successfully") for name in SERVERS)


def test_only_the_gateway_is_published_and_only_to_this_machine() -> None:
    assert {name for name in services() if "ports" in services()[name]} == {"gateway"}
    assert [filled_in(port) for port in services()["gateway"]["ports"]] == ["127.0.0.1:8000:8000"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_secret_stands_in_an_environment_or_a_file(overlay: str) -> None:
    for service in load(overlay)["services"].values():
        for variable, value in service.get("environment", {}).items():
            is_about_secrets = re.search("SECRET|KEY|TOKEN|PASSWORD", variable)
            assert not is_about_secrets or str(value).startswith("/run/secrets/"), variable
    assert not re.search(r"^(ENV|ARG).*(SECRET|API_KEY|PASSWORD)", dockerfile(), re.MULTILINE)


def test_every_secret_is_a_file_and_the_keys_are_the_gateways_alone() -> None:
    assert all(list(secret) == ["file"] for secret in load("compose.yaml")["secrets"].values())
    assert {name for name in SERVERS if "api-keys" in services()[name]["secrets"]} == {"gateway"}
    assert all("cluster-secret" in services()[name]["secrets"] for name in SERVERS)
    assert "secrets" not in services()["model"]


@pytest.mark.parametrize("name", ["model", *SERVERS])
def test_the_command_takes_what_the_environment_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in environment(name).items():
        monkeypatch.setenv(variable, value)
    settings = from_process(services()[name]["command"]).settings
    assert settings.model == Settings.model_fields["model"].default
    if name not in ("gateway", "model"):
        own = f"{settings.advertise}:{settings.port}"
        assert own == f"{name}:{settings.port}"
        assert own in getattr(settings, f"{settings.role}_addresses")
    if name != "model":
        health = from_process(["health"]).settings
        assert (health.role, health.port) == (services()[name]["command"][0], settings.port)


def test_every_server_has_its_own_port() -> None:
    ports = [environment(name).get("KVLEASE_PORT", "8000") for name in SERVERS]
    assert len(set(ports)) == len(ports)


def test_rdma_is_asked_for_by_name_and_gets_the_device_and_locked_memory_but_no_capability() -> None:
    overlay = load("compose.rdma.yaml")["services"]
    assert set(overlay) == set(SERVERS)
    for name in set(SERVERS) - {"gateway"}:
        service = overlay[name]
        assert service["environment"]["KVLEASE_TRANSPORT"] == "rdma"
        assert service["devices"] == ["/dev/infiniband:/dev/infiniband"]
        assert service["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
        assert "cap_add" not in service
        assert {entry.partition(":")[0] for entry in service["extra_hosts"]} == set(SERVERS) - {"gateway"}
    assert "devices" not in overlay["gateway"]


def test_the_image_runs_as_an_ordinary_user_and_is_watched() -> None:
    last = dockerfile().rpartition("\nFROM ")[2]
    assert re.search(r"^USER 10001:10001$", last, re.MULTILINE)
    assert re.search(r'^HEALTHCHECK .*CMD \["kvlease", "health"\]$', last, re.MULTILINE)
    assert "pip" not in last, "compilers and pip stay in the stage that used them"


def test_the_image_needs_no_builder_that_an_older_engine_lacks() -> None:
    assert not re.search(r"--mount|<<|^# syntax|COPY --chmod", dockerfile(), re.MULTILINE)


def copied() -> set[str]:
    """What the Dockerfile takes from this folder."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", dockerfile(), re.MULTILINE)
    return {word for line in lines for word in line.split()[:-1]}


def test_the_build_gets_exactly_what_the_dockerfile_copies() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in lines if line.startswith("!")} == copied()
    assert lines[1] == "*", "everything else stays here"
    assert all((ROOT / name).exists() for name in copied())


def test_every_package_is_in_the_image() -> None:
    project: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert packages <= copied()
    compiled = re.search(r"compileall -q (.+?) \\", dockerfile())
    assert compiled is not None
    assert set(compiled.group(1).split()) == packages


def test_the_image_has_the_default_model_of_this_release() -> None:
    assert f"\nmodel={SMOLLM2.requirement} " in (DEPLOY / "install-packages").read_text()


def test_secrets_are_made_once_and_differ(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    command = [str(DEPLOY / "secrets"), str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=10)
    secret, keys = ((folder / name).read_text() for name in ("cluster-secret", "api-keys"))
    assert re.fullmatch(r"[0-9a-f]{64}\n", secret)
    assert re.fullmatch(r"[0-9a-f]{64} default\n", keys)
    assert keys.split()[0] != secret.strip()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o444 for path in folder.iterdir())
    subprocess.run(command, check=True, capture_output=True, timeout=10)
    assert (folder / "cluster-secret").read_text() == secret
