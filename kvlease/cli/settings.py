"""Every option there is: name, kind, default, help, and which commands take it as a flag.

One table serves the flags, the environment (`KVLEASE_` and the name in capitals) and the configuration file, so one file
and one environment can be shared by all processes of a cluster; a command ignores what only the others use.

Never: opens a port, touches a model, or imports a server.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

ENV_PREFIX = "KVLEASE_"
SERVE, GATEWAY, PREFILL, DECODE, STATUS, DOCTOR = "serve", "gateway", "prefill", "decode", "status", "doctor"
PREPARE, HEALTH = "prepare", "health"
_SERVERS = (SERVE, GATEWAY, PREFILL, DECODE)
_ENGINES = (SERVE, PREFILL, DECODE)
_FRONTS = (SERVE, GATEWAY)
_ALONE = (GATEWAY, PREFILL, DECODE)
_LISTENERS = (*_SERVERS, DOCTOR, HEALTH)
_RDMA_USERS = (*_ENGINES, DOCTOR)
_MODELS = (*_SERVERS, PREPARE)


@dataclass(frozen=True, slots=True)
class Option:
    """How a field appears on the command line: the commands that take it, its heading in --help, its placeholder."""

    commands: tuple[str, ...]
    group: str
    metavar: str = ""


def split_commas(value: object) -> object:
    """'a:1, b:2' as a tuple; anything else is left to the field's own check."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def check_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse what is not host:port."""
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{address!r} is not an address like 10.0.0.7:9001")
    return addresses


def check_peer(address: str) -> str:
    """The same for one address, or none."""
    check_addresses((address,) if address else ())
    return address


def check_host(host: str) -> str:
    """Refuse what no peer could look up: a port, brackets or spaces with the name, or an address that means 'everywhere'."""
    if host and not re.fullmatch(r"[\w.-]+|[0-9A-Fa-f:.]+", host, re.ASCII):
        raise ValueError("not a host's name or address alone")
    if host and is_everywhere(host):
        raise ValueError("no peer can connect to this address")
    return host


def is_everywhere(host: str) -> bool:
    """Whether `host` means every address of this machine, which can be listened on and not connected to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


Addresses = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_commas), AfterValidator(check_addresses)]
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NET, _MODEL, _CLUSTER, _POOLS, _REQUESTS, _PROCESS = (
    "network",
    "model",
    "cluster",
    "KV pools and transfer",
    "requests",
    "process",
)


class Settings(BaseSettings):
    """The options of every command, merged from flags, environment, file and defaults."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, protected_namespaces=())

    model: Annotated[str, Field(min_length=1), Option(_MODELS, _MODEL, "NAME|PATH")] = Field(
        default="smollm2-135m-instruct", description="a known name, a folder with safetensors, or a GGUF file"
    )
    served_model_name: Annotated[str, Option(_FRONTS, _MODEL, "NAME")] = Field(
        default="", description="the name clients use; empty: the model's own"
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], Option(_ENGINES, _MODEL)] = Field(
        default="auto", description="of weights and KV cache"
    )
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$"), Option(_ENGINES, _MODEL, "DEVICE")] = Field(
        default="cpu", description="cpu, cuda or cuda:N"
    )
    cache: Annotated[Path | None, Option(_MODELS, _MODEL, "DIR")] = Field(
        default=None, description="where prepared models are kept; by default in the user's cache folder"
    )

    host: Annotated[str, Field(min_length=1), Option(_LISTENERS, _NET, "HOST")] = Field(
        default="127.0.0.1", description="address to listen on"
    )
    advertise: Annotated[str, AfterValidator(check_host), Option((PREFILL, DECODE), _NET, "HOST")] = Field(
        default="", description="the name or address at which peers reach this server; empty: that of --host"
    )
    port: Annotated[int | None, Field(ge=0, le=65535), Option(_LISTENERS, _NET, "PORT")] = Field(
        default=None,
        description="port to listen on, 0 for any free one; HTTP is on 8000 by default, prefill and decode on any",
    )
    api_keys_file: Annotated[Path | None, Option((*_FRONTS, STATUS), _NET, "FILE")] = Field(
        default=None, description="lines of `key tenant`; without it no key is asked for; `status` uses the first"
    )
    secret_file: Annotated[Path | None, Option((*_ALONE, DOCTOR, HEALTH), _NET, "FILE")] = Field(
        default=None, description=f"the cluster's secret, the same for all its servers; or set {ENV_PREFIX}SECRET"
    )
    prefill_addresses: Annotated[Addresses, Option((GATEWAY, DECODE), _CLUSTER, "HOST:PORT,...")] = Field(
        default=(), description="the prefill servers"
    )
    decode_addresses: Annotated[Addresses, Option((GATEWAY,), _CLUSTER, "HOST:PORT,...")] = Field(
        default=(), description="the decode servers"
    )
    prefill_servers: Annotated[int, Field(ge=1, le=64), Option((SERVE,), _CLUSTER, "N")] = Field(
        default=1, description="prefill processes to start"
    )
    decode_servers: Annotated[int, Field(ge=1, le=64), Option((SERVE,), _CLUSTER, "N")] = Field(
        default=1, description="decode processes to start"
    )

    block_size: Annotated[int, Field(ge=1, le=1024), Option(_ENGINES, _POOLS, "TOKENS")] = Field(
        default=16, description="token slots in one KV block"
    )
    prefill_blocks: Annotated[Count, Option((SERVE, PREFILL), _POOLS, "N")] = Field(
        default=0, description="KV blocks of each prefill server; 0: chosen from the context length"
    )
    decode_blocks: Annotated[Count, Option((SERVE, DECODE), _POOLS, "N")] = Field(
        default=0, description="KV blocks of each decode server; 0: chosen from the context length"
    )
    max_model_len: Annotated[Count, Option(_SERVERS, _POOLS, "TOKENS")] = Field(
        default=0, description="context that must fit, or nothing starts; 0: whatever fits the pools"
    )
    transport: Annotated[Literal["auto", "tcp", "rdma"], Option(_ENGINES, _POOLS)] = Field(
        default="auto", description="how KV blocks travel"
    )
    rdma_device: Annotated[str, Option(_RDMA_USERS, _POOLS, "NAME[:PORT[:GID]]")] = Field(
        default="", description="for rdma; empty: the first active port, with its best GID"
    )
    ring_bytes: Annotated[ByteSize, Field(gt=0), Option(_RDMA_USERS, _POOLS, "BYTES")] = Field(
        default=ByteSize(32 << 20), description="memory of one pair's ring, for example 32MiB"
    )

    max_queue: Annotated[Positive, Option(_ENGINES, _REQUESTS, "N")] = Field(
        default=256, description="requests that may wait at a server; more are refused at once"
    )
    max_batch: Annotated[Positive, Option((SERVE, DECODE), _REQUESTS, "N")] = Field(
        default=64, description="sequences decoded together"
    )
    chunk_tokens: Annotated[Positive, Option((SERVE, PREFILL), _REQUESTS, "TOKENS")] = Field(
        default=512, description="prompt tokens computed in one step"
    )
    default_max_tokens: Annotated[Positive, Option(_FRONTS, _REQUESTS, "TOKENS")] = Field(
        default=512, description="of a chat answer when the client names no limit"
    )
    deadline: Annotated[Seconds, Option(_FRONTS, _REQUESTS, "SECONDS")] = Field(
        default=600.0, description="longest time one request may take"
    )

    threads: Annotated[Count, Option(_ENGINES, _PROCESS, "N")] = Field(
        default=0, description="compute threads of each server; 0: one under `serve`, else one per core"
    )
    drain: Annotated[float, Field(ge=0, allow_inf_nan=False), Option((SERVE,), _PROCESS, "SECONDS")] = Field(
        default=30.0,
        description="time that running requests get to finish at Ctrl-C; a second Ctrl-C ends them at once",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Option(_SERVERS, _PROCESS)] = Field(
        default="info", description="logs go to stderr"
    )
    role: Annotated[Literal["gateway", "prefill", "decode"], Option((HEALTH,), _NET)] = Field(
        default="gateway", description="what the server that is asked is"
    )
    url: Annotated[str, Field(pattern=r"^https?://[^/]+"), Option((STATUS,), _NET, "URL")] = Field(
        default="http://127.0.0.1:8000", description="of the gateway that is asked"
    )

    peer: Annotated[str, AfterValidator(check_peer), Option((DOCTOR,), _NET, "HOST:PORT")] = Field(
        default="", description="of a `kvlease doctor --listen` on another machine, to try the path to it"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags (the constructor's arguments), then environment, then the configuration file. No .env, no secrets folder."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def option_of(name: str) -> Option:
    """The command-line side of the field `name`."""
    return next(item for item in Settings.model_fields[name].metadata if isinstance(item, Option))


def options_of(command: str) -> tuple[str, ...]:
    """Names of the fields that `command` takes, in the order of their definition."""
    return tuple(name for name in Settings.model_fields if command in option_of(name).commands)
