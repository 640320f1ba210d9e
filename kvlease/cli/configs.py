"""From settings to the configuration of each server, and back and forth to the document that a parent hands its children.

Never: starts anything; puts a secret or a key into a message.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from decode_server.config import DecodeConfig
from gateway.config import GatewayConfig
from kvlease.cli.errors import ConfigurationError
from kvlease.cli.limits import Limits
from kvlease.cli.options import SECRET_VARIABLE, flag_of
from kvlease.cli.settings import is_everywhere
from prefill_server.config import PrefillConfig
from transport.errors import TransportRefused
from transport.rdma import DeviceChoice, usable_link

if TYPE_CHECKING:
    from kvlease.cli.settings import Settings

ServerConfig = GatewayConfig | PrefillConfig | DecodeConfig
HTTP_PORT = 8000
LOOPBACK = "127.0.0.1"


def gateway_config(
    settings: Settings, model: Path, secret: str, prefill: tuple[str, ...], decode: tuple[str, ...]
) -> GatewayConfig:
    """A gateway in front of the servers at `prefill` and `decode`. Reads the keys' file."""
    return GatewayConfig(
        model=model,
        secret=secret,
        prefill_servers=prefill,
        decode_servers=decode,
        host=settings.host,
        port=HTTP_PORT if settings.port is None else settings.port,
        served_model_name=settings.served_model_name,
        max_model_len=settings.max_model_len,
        default_max_tokens=settings.default_max_tokens,
        deadline_s=settings.deadline,
        api_keys=read_api_keys(settings.api_keys_file) if settings.api_keys_file else (),
    )


def prefill_config(settings: Settings, model: Path, secret: str, host: str, port: int) -> PrefillConfig:
    """A prefill server at `host`:`port`."""
    return PrefillConfig(
        model=model,
        secret=secret,
        host=host,
        advertise=settings.advertise,
        port=port,
        dtype=settings.dtype,
        device=settings.device,
        block_size=settings.block_size,
        num_blocks=settings.prefill_blocks,
        max_model_len=settings.max_model_len,
        max_queue=settings.max_queue,
        chunk_tokens=settings.chunk_tokens,
        threads=settings.threads,
        transport=settings.transport,
        rdma_device=settings.rdma_device,
        ring_bytes=int(settings.ring_bytes),
    )


def decode_config(
    settings: Settings, model: Path, secret: str, at: tuple[str, int], prefill: tuple[str, ...]
) -> DecodeConfig:
    """A decode server at `at` (host and port) that pairs with the servers at `prefill`."""
    host, port = at
    return DecodeConfig(
        model=model,
        secret=secret,
        prefill_servers=prefill,
        host=host,
        advertise=settings.advertise,
        port=port,
        dtype=settings.dtype,
        device=settings.device,
        block_size=settings.block_size,
        num_blocks=settings.decode_blocks,
        max_model_len=settings.max_model_len,
        max_queue=settings.max_queue,
        max_batch=settings.max_batch,
        threads=settings.threads,
        transport=settings.transport,
        rdma_device=settings.rdma_device,
        ring_bytes=int(settings.ring_bytes),
    )


def refuse_unusable(settings: Settings) -> None:
    """What is well formed and still cannot be had on this machine. Raises ConfigurationError."""
    if settings.transport == "rdma":
        refuse_missing_rdma(settings.rdma_device)
    if settings.api_keys_file:
        read_api_keys(settings.api_keys_file)  # again when the gateway is configured; here, before anything heavy


def refuse_missing_rdma(rdma_device: str) -> None:
    """Say at once, before a model is loaded, that no RDMA device can be used. The servers test it when they start."""
    try:
        device = DeviceChoice.parse(rdma_device)
    except ValueError as error:
        raise ConfigurationError(f"--rdma-device: {error}") from None
    try:
        usable_link(device)
    except TransportRefused as error:
        raise ConfigurationError(
            f"--transport rdma: {error}; `kvlease doctor` tells more, --transport tcp needs none of it"
        ) from None


def read_api_keys(path: Path) -> tuple[tuple[str, str], ...]:
    """(key, tenant) of each line; empty lines and lines beginning with # are skipped."""
    keys: dict[str, str] = {}
    for number, line in enumerate(_read(path, "--api-keys-file").splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise ConfigurationError(f"{path}, line {number}: expected `key tenant`, found {len(words)} words")
        if words[0] in keys:
            raise ConfigurationError(f"{path}, line {number}: this key appears a second time")
        keys[words[0]] = words[1]
    if not keys:
        raise ConfigurationError(f"{path}: no key in it, so nobody could use the API; add one or drop --api-keys-file")
    return tuple(keys.items())


def first_api_key(settings: Settings) -> str:
    """A key that the gateway knows; empty where no file of keys is given."""
    return read_api_keys(settings.api_keys_file)[0][0] if settings.api_keys_file else ""


def take_secret(settings: Settings, environ: MutableMapping[str, str], limits: Limits) -> str:
    """The cluster's secret from its file or the environment, which then no longer holds it.

    Raises ConfigurationError when there is none, or one that is too weak for the address that is listened on.
    """
    inherited = environ.pop(SECRET_VARIABLE, "")
    secret = _read(settings.secret_file, "--secret-file").strip() if settings.secret_file else inherited.strip()
    if not secret:
        raise ConfigurationError(f"the cluster's secret is missing: give --secret-file or set {SECRET_VARIABLE}")
    if not is_loopback(settings.host) and len(secret) < limits.min_secret_chars:
        raise ConfigurationError(
            f"--host {settings.host} can be reached from other machines, and the cluster's secret has only {len(secret)}"
            f" characters: use at least {limits.min_secret_chars}, for example from `openssl rand -hex 16`"
        )
    return secret


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_addresses(settings: Settings, *names: str) -> None:
    """Refuse to start a server alone without the peers it needs."""
    for name in names:
        if not getattr(settings, name):
            raise ConfigurationError(f"{flag_of(name)} is missing: name at least one server as host:port")


def require_a_name_for_peers(settings: Settings) -> None:
    """Refuse an engine's server that listens everywhere and does not say where that is."""
    if is_everywhere(settings.host) and not settings.advertise:
        raise ConfigurationError(
            f"--host {settings.host} is every address of this machine, and none that a peer could connect to:"
            " add --advertise with the name or address at which the others reach this server"
        )


def shown_host(host: str) -> str:
    """`host` as a part of an address that is used on this machine: what listens everywhere is reached over loopback."""
    if is_everywhere(host):
        return LOOPBACK
    return f"[{host}]" if ":" in host else host


def to_document(config: ServerConfig) -> dict[str, object]:
    """The configuration as plain JSON values."""
    document: dict[str, object] = TypeAdapter(type(config)).dump_python(config, mode="json")
    return document


def from_document(kind: type[ServerConfig], document: Mapping[str, object]) -> ServerConfig:
    """The inverse of `to_document`, for values that came out of JSON."""
    adapter: TypeAdapter[ServerConfig] = TypeAdapter(kind)
    return adapter.validate_python(document)


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigurationError(f"{option}: {path} cannot be read: {reason}") from None


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
