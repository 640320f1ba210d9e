from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvlease.cli.errors import CommandError, ConfigurationError, Unreachable
from kvlease.cli.health import report_health
from kvlease.cli.limits import Limits
from kvlease.cli.main import main
from kvlease.cli.settings import Settings
from kvlease.models.tiny import make_tiny_model
from tests.cli.test_status import gateway
from tests.cluster.harness import SECRET, cluster

LIMITS = Limits(answer_s=5.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def outcome(settings: Settings, secret: str = SECRET) -> str:
    """What it prints, or the refusal."""
    try:
        return report_health(settings, {"KVLEASE_SECRET": secret}, LIMITS)
    except CommandError as error:
        return f"{type(error).__name__}: {error}"


def test_an_engines_server_is_well_when_it_answers_its_own_role_and_secret(model: Path) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            for role, address in (("prefill", running.prefill.address), ("decode", running.decode.address)):
                port = int(address.rpartition(":")[2])
                settings = Settings.model_validate({"role": role, "port": port})
                assert await asyncio.to_thread(outcome, settings) == f"{role} {address}: 0 waiting, 0 running\n"
                assert "UNAUTHENTICATED" in await asyncio.to_thread(outcome, settings, "another secret")
                other = settings.model_copy(update={"role": "decode" if role == "prefill" else "prefill"})
                assert "UNIMPLEMENTED" in await asyncio.to_thread(outcome, other)
        assert outcome(settings).startswith(f"Unreachable: no decode server answers at {address}: ")

    asyncio.run(test())


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_gateway_is_well_when_it_can_serve(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with gateway(200, b"{}", "/ready") as url:
        settings = Settings(host=host, port=int(url.rpartition(":")[2]))
        assert outcome(settings) == f"gateway {url}: ready\n"
        monkeypatch.setenv("KVLEASE_PORT", str(settings.port))
        assert main(["health"]) == 0
    with gateway(503, b"{}", "/ready") as url, pytest.raises(Unreachable, match="503"):
        report_health(Settings(port=int(url.rpartition(":")[2])), {}, LIMITS)
    assert main(["health"]) == 1


def test_an_engines_server_without_a_port_cannot_be_asked() -> None:
    with pytest.raises(ConfigurationError, match="--port"):
        report_health(Settings(role="decode"), {"KVLEASE_SECRET": SECRET}, LIMITS)
