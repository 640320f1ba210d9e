from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from decode_server.config import DecodeConfig
from gateway.config import GatewayConfig
from kvlease.cli.alone import port_of, run_alone
from kvlease.cli.capacity import PoolSize, refuse_context_that_does_not_fit
from kvlease.cli.configs import (
    ServerConfig,
    decode_config,
    from_document,
    is_loopback,
    prefill_config,
    read_api_keys,
    refuse_unusable,
    take_secret,
    to_document,
)
from kvlease.cli.errors import ConfigurationError
from kvlease.cli.limits import Limits
from kvlease.cli.serve import make_plan
from kvlease.cli.settings import Settings
from prefill_server.config import PrefillConfig
from tests.rdma.machine import has_rdma_device

MODEL = Path("/models/stub")
LIMITS = Limits()


@pytest.mark.parametrize(
    "config",
    [
        GatewayConfig(MODEL, "s", ("a:1",), ("b:2", "c:3"), api_keys=(("key", "tenant"),)),
        PrefillConfig(MODEL, "s", port=7, num_blocks=43),
        DecodeConfig(MODEL, "s", ("a:1",), transport="tcp"),
    ],
)
def test_a_configuration_survives_its_document(config: ServerConfig) -> None:
    assert from_document(type(config), json.loads(json.dumps(to_document(config)))) == config


def test_servers_of_one_machine_know_each_other_and_share_one_fresh_secret() -> None:
    settings = Settings(prefill_servers=2, decode_servers=1, prefill_blocks=43, decode_blocks=128)
    plan, again = (make_plan(settings, MODEL, 8000, (1, 2, 3)) for _ in range(2))
    assert [name for name, _, _ in plan.servers] == ["prefill-0", "prefill-1", "decode-0", "gateway"]
    configs = [config for _, _, config in plan.servers]
    prefill, _, decode, gateway = configs
    assert isinstance(prefill, PrefillConfig)
    assert isinstance(decode, DecodeConfig)
    assert isinstance(gateway, GatewayConfig)
    assert (prefill.host, prefill.port, prefill.num_blocks, prefill.threads) == ("127.0.0.1", 1, 43, 1)
    assert (decode.port, decode.num_blocks, decode.threads) == (3, 128, 1)
    assert gateway.prefill_servers == decode.prefill_servers == ("127.0.0.1:1", "127.0.0.1:2")
    assert gateway.decode_servers == ("127.0.0.1:3",)
    assert {len(config.secret) for config in configs} == {64}
    assert len({config.secret for config in configs}) == 1
    assert again.servers[0][2].secret != prefill.secret


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:1"), ("::1", "http://[::1]:1")])
def test_the_url_can_be_used_by_a_client(host: str, url: str) -> None:
    assert make_plan(Settings(host=host), MODEL, 1, (2, 3)).url == url


@pytest.mark.skipif(has_rdma_device(), reason="this machine has an RDMA device")
def test_rdma_without_a_device_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigurationError, match=r"--transport rdma: .*kvlease doctor"):
        refuse_unusable(Settings(transport="rdma"))


def test_a_malformed_device_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--rdma-device"):
        refuse_unusable(Settings(transport="rdma", rdma_device="a:b"))


POOLS = (PoolSize("--prefill-blocks", 43, 16), PoolSize("--decode-blocks", 128, 16))


def test_a_context_that_fits_no_pool_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigurationError) as caught:
        refuse_context_that_does_not_fit(1024, 2048, POOLS)
    assert str(caught.value) == (
        "--max-model-len 1024 does not fit --prefill-blocks 43: 43 blocks of 16 tokens hold 688;"
        " give at least 64 blocks, or --max-model-len 688 at most"
    )
    with pytest.raises(ConfigurationError, match="--decode-blocks 43"):
        refuse_context_that_does_not_fit(1024, 2048, (PoolSize("--decode-blocks", 43, 16),))
    with pytest.raises(ConfigurationError, match="4096 is more than the model's context of 2048"):
        refuse_context_that_does_not_fit(4096, 2048, ())


@pytest.mark.parametrize("max_model_len", [0, 1, 687, 688])
def test_a_context_that_fits_or_is_not_asked_for_is_not_refused(max_model_len: int) -> None:
    refuse_context_that_does_not_fit(max_model_len, 2048, (*POOLS, PoolSize("--decode-blocks", 0, 16)))


def test_keys_are_read_with_their_tenants(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nk1 acme\n\n  k2\tglobex  \n")
    assert read_api_keys(file) == (("k1", "acme"), ("k2", "globex"))


@pytest.mark.parametrize(
    ("text", "fault"),
    [("k1\n", "line 1"), ("k1 a\nk2 b c\n", "line 2"), ("k1 a\nk1 b\n", "line 2"), ("", "no key")],
)
def test_a_malformed_keys_file_is_refused_without_showing_a_key(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=fault) as caught:
        read_api_keys(file)
    assert "k1" not in str(caught.value)
    assert "k2" not in str(caught.value)


def test_the_secret_leaves_the_environment() -> None:
    environ = {"KVLEASE_SECRET": "from the environment"}
    assert take_secret(Settings(), environ, LIMITS) == "from the environment"
    assert environ == {}


def test_the_secrets_file_wins(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from the file\n")
    environ = {"KVLEASE_SECRET": "from the environment"}
    assert take_secret(Settings(secret_file=file), environ, LIMITS) == "from the file"
    assert environ == {}


@pytest.mark.parametrize(("host", "length"), [("127.0.0.1", 0), ("0.0.0.0", 0), ("0.0.0.0", 15), ("node-7", 15)])
def test_a_weak_secret_is_refused(host: str, length: int) -> None:
    with pytest.raises(ConfigurationError, match="secret"):
        take_secret(Settings(host=host), {"KVLEASE_SECRET": "x" * length}, LIMITS)


@pytest.mark.parametrize(("host", "length"), [("127.0.0.1", 1), ("::1", 1), ("localhost", 1), ("0.0.0.0", 16)])
def test_a_secret_that_suits_the_address_is_taken(host: str, length: int) -> None:
    assert len(take_secret(Settings(host=host), {"KVLEASE_SECRET": "x" * length}, LIMITS)) == length


def test_only_loopback_is_loopback() -> None:
    assert [host for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost") if not is_loopback(host)] == []
    assert [host for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "") if is_loopback(host)] == []


@pytest.mark.parametrize(
    ("command", "missing"),
    [("gateway", "--prefill-addresses"), ("decode", "--prefill-addresses"), ("prefill", "secret")],
)
def test_a_lone_server_without_what_it_needs_is_refused(command: str, missing: str) -> None:
    with pytest.raises(ConfigurationError, match=missing):
        run_alone(command, Settings(), {})


@pytest.mark.parametrize("command", ["prefill", "decode"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_engines_server_that_listens_everywhere_must_say_where_peers_reach_it(command: str, host: str) -> None:
    settings = Settings(host=host, prefill_addresses=("a:1",), model="/no/such/folder")
    with pytest.raises(ConfigurationError, match="--advertise"):
        run_alone(command, settings, {"KVLEASE_SECRET": "x" * 16})
    named = settings.model_copy(update={"advertise": "node-7", "host": "0.0.0.0"})
    with pytest.raises(ConfigurationError, match="/no/such/folder"):
        run_alone(command, named, {"KVLEASE_SECRET": "x" * 16})


def test_a_gateway_may_listen_everywhere() -> None:
    settings = Settings(host="0.0.0.0", prefill_addresses=("a:1",), decode_addresses=("b:1",), model="/no/such/folder")
    with pytest.raises(ConfigurationError, match="/no/such/folder"):
        run_alone("gateway", settings.model_copy(update={"port": 0}), {"KVLEASE_SECRET": "x" * 16})


def test_the_name_for_peers_reaches_the_server() -> None:
    settings = Settings(host="0.0.0.0", advertise="node-7")
    assert prefill_config(settings, MODEL, "s", "0.0.0.0", 7).advertise == "node-7"
    assert decode_config(settings, MODEL, "s", ("0.0.0.0", 7), ()).advertise == "node-7"


def test_a_lone_servers_port_in_use_is_refused_before_its_model_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = Settings(model="/no/such/folder", port=port)
        with pytest.raises(ConfigurationError, match=f"--port {port}"):
            run_alone("prefill", settings, {"KVLEASE_SECRET": "s"})


@pytest.mark.parametrize(("command", "port"), [("gateway", 8000), ("prefill", 0), ("decode", 0)])
def test_only_the_gateway_has_a_port_of_its_own(command: str, port: int) -> None:
    assert port_of(command, Settings()) == port
    assert port_of(command, Settings(port=7)) == 7


def test_a_broken_keys_file_is_refused_before_anything_heavy(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="api-keys-file"):
        refuse_unusable(Settings(api_keys_file=tmp_path / "missing"))
