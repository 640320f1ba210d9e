"""`kvlease gateway|prefill|decode`: one server in this process, for a cluster that spans machines.

Never: makes a secret; without the cluster's own, nothing starts.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from contextlib import ExitStack
from pathlib import Path

from kvlease.cli.capacity import PoolSize
from kvlease.cli.child import limit_threads, run_to_exit, serving
from kvlease.cli.configs import (
    HTTP_PORT,
    ServerConfig,
    cores,
    decode_config,
    gateway_config,
    prefill_config,
    require_a_name_for_peers,
    require_addresses,
    take_secret,
)
from kvlease.cli.limits import Limits
from kvlease.cli.ports import reserve_port
from kvlease.cli.preparation import prepare
from kvlease.cli.settings import DECODE, GATEWAY, PREFILL, Settings
from kvlease.telemetry.logs import set_up_logs


def run_alone(command: str, settings: Settings, environ: MutableMapping[str, str]) -> int:
    """Run one server until it ends. Returns the exit code; raises ConfigurationError."""
    settings = settings.model_copy(update={"threads": settings.threads or cores()})
    require_addresses(settings, *_peers(command))
    if command != GATEWAY:
        require_a_name_for_peers(settings)
    secret = take_secret(settings, environ, Limits())
    limit_threads(settings.threads, environ)
    with ExitStack() as reservation:
        if port := port_of(command, settings):
            reservation.enter_context(reserve_port(settings.host, port))  # one line now, not after the model is loaded
        return _run(command, settings, secret)


def _run(command: str, settings: Settings, secret: str) -> int:
    config = _config(command, settings, prepare(settings, _pools(command, settings)), secret)
    set_up_logs(command, level=settings.log_level)
    server = serving(config, lambda address: print(f"kvlease {command} is listening: {address}", flush=True))
    return run_to_exit(server, lambda line: print(f"kvlease: {line}", file=sys.stderr))


def port_of(command: str, settings: Settings) -> int:
    """Where the server listens; 0: on any free port."""
    if settings.port is not None:
        return settings.port
    return HTTP_PORT if command == GATEWAY else 0


def _peers(command: str) -> tuple[str, ...]:
    """Options without which the server has nobody to work with."""
    return {GATEWAY: ("prefill_addresses", "decode_addresses"), DECODE: ("prefill_addresses",)}.get(command, ())


def _pools(command: str, settings: Settings) -> tuple[PoolSize, ...]:
    match command:
        case "prefill":
            return (PoolSize("--prefill-blocks", settings.prefill_blocks, settings.block_size),)
        case "decode":
            return (PoolSize("--decode-blocks", settings.decode_blocks, settings.block_size),)
        case _:
            return ()


def _config(command: str, settings: Settings, model: Path, secret: str) -> ServerConfig:
    if command == GATEWAY:
        return gateway_config(settings, model, secret, settings.prefill_addresses, settings.decode_addresses)
    at = (settings.host, port_of(command, settings))
    if command == PREFILL:
        return prefill_config(settings, model, secret, *at)
    return decode_config(settings, model, secret, at, settings.prefill_addresses)
