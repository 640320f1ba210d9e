"""`kvlease health`: asks the one server that this machine, or this container, is for.

It takes the same environment and file as the server, so a container's health check needs no arguments.

Never: asks beyond this machine, or says more than one line.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from kvlease.cli.asking import get
from kvlease.cli.configs import HTTP_PORT, shown_host, take_secret
from kvlease.cli.errors import ConfigurationError, Unreachable
from kvlease.cli.limits import Limits
from kvlease.cli.settings import GATEWAY, PREFILL, Settings

if TYPE_CHECKING:
    from kvlease.v1.kvlease_pb2 import ServerStatus

_OK = 200


def report_health(settings: Settings, environ: MutableMapping[str, str], limits: Limits) -> str:
    """One line of a server that is well. Raises Unreachable for one that is not, ConfigurationError when it cannot be asked.

    A gateway is well when it can serve; a prefill or decode server when its loops answer.
    """
    host = shown_host(settings.host)
    if settings.role == GATEWAY:
        return _ask_gateway(f"http://{host}:{HTTP_PORT if settings.port is None else settings.port}", limits)
    if not settings.port:
        raise ConfigurationError("--port is missing: a prefill or decode server has none of its own")
    status = _ask_engine(f"{host}:{settings.port}", settings.role, take_secret(settings, environ, limits), limits)
    return f"{status.role} {status.address}: {status.num_queued} waiting, {status.num_running} running\n"


def _ask_gateway(url: str, limits: Limits) -> str:
    answer = get(url, "/ready", limits)
    if answer.status != _OK:
        raise Unreachable(f"the gateway at {url} cannot serve yet: /ready answered {answer.status}")
    return f"gateway {url}: ready\n"


def _ask_engine(address: str, role: str, secret: str, limits: Limits) -> ServerStatus:
    import grpc  # noqa: PLC0415  a gateway's check needs none

    from kvlease.peering.channels import credentials  # noqa: PLC0415
    from kvlease.v1 import kvlease_pb2 as pb  # noqa: PLC0415
    from kvlease.v1 import kvlease_pb2_grpc as rpc  # noqa: PLC0415

    with grpc.insecure_channel(address) as channel:
        stub = rpc.PrefillStub(channel) if role == PREFILL else rpc.DecodeStub(channel)
        try:
            status: ServerStatus = stub.Status(
                pb.StatusRequest(), metadata=credentials(secret), timeout=limits.answer_s
            )
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            raise Unreachable(f"no {role} server answers at {address}: {reason}") from None
    return status
