"""`kvlease serve`: one gateway, N prefill servers and M decode servers as processes of this machine.

Ports are reserved for as long as the parent lives, so a restarted server comes back where its peers look for it.

Never: imports torch; shows the cluster's secret to anyone but the children.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import kvlease
from decode_server.config import DecodeConfig
from gateway.config import GatewayConfig
from kvlease.cli.asking import get
from kvlease.cli.capacity import PoolSize
from kvlease.cli.child import limit_threads
from kvlease.cli.cluster import Cluster, ServerProcess
from kvlease.cli.configs import (
    HTTP_PORT,
    LOOPBACK,
    ServerConfig,
    decode_config,
    gateway_config,
    prefill_config,
    shown_host,
    to_document,
)
from kvlease.cli.errors import Unreachable
from kvlease.cli.limits import Limits
from kvlease.cli.options import flag_of
from kvlease.cli.ports import reserve_port
from kvlease.cli.preparation import prepare
from kvlease.cli.settings import DECODE, ENV_PREFIX, GATEWAY, PREFILL, Settings
from kvlease.cli.supervision import Tier
from prefill_server.config import PrefillConfig

_OK = 200
_TIERS = {PrefillConfig: Tier.PREFILL, DecodeConfig: Tier.DECODE, GatewayConfig: Tier.GATEWAY}


@dataclass(frozen=True, slots=True)
class Plan:
    """The servers of one cluster: name, command and configuration of each."""

    servers: tuple[tuple[str, str, ServerConfig], ...]
    url: str
    api_key: str


#: Ours. -P: a folder named like one of our packages, in the folder we were started in, is not ours.
SERVER_PROGRAM = (sys.executable, "-P", "-m", "kvlease")

Prepare = Callable[[Settings, tuple[PoolSize, ...]], Path]


def serve(settings: Settings, program: tuple[str, ...] = SERVER_PROGRAM, prepare_model: Prepare = prepare) -> int:
    """Run a whole cluster until it is told to stop. Returns the exit code; raises ConfigurationError.

    `program` is started with a server's command and --supervised, see `kvlease.cli.child`.
    """
    limits = Limits()
    with ExitStack() as reservations:
        http_port = reservations.enter_context(reserve_port(settings.host, _http_port(settings))).getsockname()[1]
        num_engines = settings.prefill_servers + settings.decode_servers
        held = [reservations.enter_context(reserve_port(LOOPBACK, 0)) for _ in range(num_engines)]
        model = prepare_model(settings, _pools(settings))
        plan = make_plan(settings, model, http_port, tuple(sock.getsockname()[1] for sock in held))
        processes = [
            to_process(name, (*program, command, "--supervised"), config, settings)
            for name, command, config in plan.servers
        ]
        cluster = Cluster(processes, settings.drain, write_stderr, limits)
        return asyncio.run(cluster.run(announce(plan, model.name, limits)))


def _http_port(settings: Settings) -> int:
    return HTTP_PORT if settings.port is None else settings.port


def _pools(settings: Settings) -> tuple[PoolSize, ...]:
    return tuple(
        PoolSize(flag_of(name), getattr(settings, name), settings.block_size)
        for name in ("prefill_blocks", "decode_blocks")
    )


def make_plan(settings: Settings, model: Path, http_port: int, engine_ports: tuple[int, ...]) -> Plan:
    """Every server's configuration, under a secret of their own. `engine_ports`: prefill's, then decode's."""
    secret = secrets.token_hex(32)
    settings = settings.model_copy(update={"threads": settings.threads or 1, "port": http_port})
    prefill_ports, decode_ports = engine_ports[: settings.prefill_servers], engine_ports[settings.prefill_servers :]
    prefill_at = tuple(f"{LOOPBACK}:{port}" for port in prefill_ports)
    decode_at = tuple(f"{LOOPBACK}:{port}" for port in decode_ports)
    gateway = gateway_config(settings, model, secret, prefill_at, decode_at)
    servers: list[tuple[str, str, ServerConfig]] = []
    for index, port in enumerate(prefill_ports):
        servers.append((f"prefill-{index}", PREFILL, prefill_config(settings, model, secret, LOOPBACK, port)))
    for index, port in enumerate(decode_ports):
        config = decode_config(settings, model, secret, (LOOPBACK, port), prefill_at)
        servers.append((f"decode-{index}", DECODE, config))
    servers.append(("gateway", GATEWAY, gateway))
    api_key = gateway.api_keys[0][0] if gateway.api_keys else ""
    return Plan(tuple(servers), f"http://{shown_host(settings.host)}:{http_port}", api_key)


def to_process(name: str, program: tuple[str, ...], config: ServerConfig, settings: Settings) -> ServerProcess:
    """How to start the server of this configuration."""
    return ServerProcess(
        name=name,
        tier=_TIERS[type(config)],
        program=program,
        environ=child_environ(os.environ, settings.threads or 1),
        document={"log_level": settings.log_level, "config": to_document(config)},
    )


def child_environ(environ: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """Ours without our own variables (settings travel in the document), with the thread limits set before any library loads."""
    result = {name: value for name, value in environ.items() if not name.upper().startswith(ENV_PREFIX)}
    limit_threads(num_threads, result)
    result["PYTHONUNBUFFERED"] = "1"
    root = str(Path(kvlease.__file__).parents[1])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        result["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environ.get("PYTHONPATH")])])
    return result


async def announce(plan: Plan, model_name: str, limits: Limits) -> None:
    """Wait until the gateway says it can serve, then print the one line that scripts wait for."""
    while not await asyncio.to_thread(_is_ready, plan.url, limits):  # noqa: ASYNC110  another process decides
        await asyncio.sleep(limits.ready_poll_s)
    name, context = await asyncio.to_thread(_advertised, plan, limits)
    transport = await asyncio.to_thread(_carried_by, plan, limits)
    print(
        f"kvlease is ready: {plan.url}/v1  (model {name or model_name}, context {context}, transport {transport})",
        flush=True,
    )


def _is_ready(url: str, limits: Limits) -> bool:
    with suppress(Unreachable):
        return get(url, "/ready", limits).status == _OK
    return False


def _carried_by(plan: Plan, limits: Limits) -> str:
    """The transports of the pairs that can serve, by their own word."""
    with suppress(Unreachable):
        pairs = get(plan.url, "/ready", limits).json().get("pairs")
        if isinstance(pairs, list):
            return (
                ", ".join(sorted({str(pair.get("transport")) for pair in pairs if isinstance(pair, dict)})) or "unknown"
            )
    return "unknown"


def _advertised(plan: Plan, limits: Limits) -> tuple[str, object]:
    """Name and context of the model that clients see."""
    with suppress(Unreachable):
        models = get(plan.url, "/v1/models", limits, plan.api_key).json().get("data")
        if isinstance(models, list) and models and isinstance(models[0], dict):
            return str(models[0].get("id", "")), models[0].get("max_model_len", "unknown")
    return "", "unknown"


def write_stderr(data: bytes) -> None:
    """All of `data`, or nothing at all once nobody reads it: logs never end the cluster."""
    view = memoryview(data)
    with suppress(BrokenPipeError):
        while view:
            view = view[os.write(2, view) :]
