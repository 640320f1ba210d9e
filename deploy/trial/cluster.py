"""The cluster of a trial: compose around it, and a client in front.

Never: leaves a container, network or volume of its own behind.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.trial.commands import ROOT, TrialFailed, attempt, install, run, say
from deploy.trial.image import IMAGE

PROJECT = "kvlease-smoke"
SERVERS = ("gateway", "prefill-0", "prefill-1", "decode-0", "decode-1")
#: A seeded model of a few hundred kilobytes, for a trial of the way and not of the text.
_MAKE_TINY = (
    "from pathlib import Path; from kvlease.models.tiny import make_tiny_model; make_tiny_model(Path('/models/tiny'))"
)
_UP_S, _DOWN_S, _DOCKER_S = 300, 120, 60
_OK = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request; `status` 0: the connection broke."""

    status: int
    body: str
    seconds: float

    def json(self) -> dict[str, object]:
        """The body, which must be an object."""
        document = json.loads(self.body)
        assert isinstance(document, dict)
        return document


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running one. `environ` is what compose fills its files in with."""

    words: tuple[str, ...]
    environ: dict[str, str]
    port: int
    api_key: str

    def compose(self, *words: str, within_s: float = _DOCKER_S) -> str:
        """Output of a compose command on this cluster."""
        return run([*self.words, *words], within_s=within_s, environ=self.environ)

    def container(self, service: str) -> str:
        """The id of a service's container."""
        found = self.compose("ps", "--all", "-q", service).split()
        if not found:
            raise TrialFailed(f"{service} has no container")
        return found[-1]

    def inspect(self, service: str, template: str) -> str:
        """`docker inspect` of a service's container."""
        command = ["docker", "inspect", "--format", template, self.container(service)]
        return run(command, within_s=_DOCKER_S).strip()

    def address(self, service: str) -> str:
        """The address of a service's container in the cluster's network."""
        return self.inspect(service, "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")

    def network(self) -> str:
        """The name of the cluster's network."""
        return self.inspect("gateway", "{{range $name, $_ := .NetworkSettings.Networks}}{{$name}}{{end}}")

    def request(self, method: str, path: str, body: object = None, *, within_s: float) -> Answer:
        """One HTTP request on a connection of its own."""
        started = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=within_s)
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return Answer(response.status, response.read().decode(), time.monotonic() - started)
        except (OSError, http.client.HTTPException) as error:
            return Answer(0, str(error) or type(error).__name__, time.monotonic() - started)
        finally:
            connection.close()

    def is_ready(self) -> bool:
        """Whether the gateway can serve."""
        return self.request("GET", "/ready", within_s=5).status == _OK

    def server(self, service: str) -> dict[str, object]:
        """What the gateway knows of a prefill or decode server; empty: nothing."""
        answer = self.request("GET", "/status", within_s=5)
        servers = answer.json().get("servers") if answer.status == _OK else None
        for server in servers if isinstance(servers, list) else []:
            if str(server.get("address", "")).partition(":")[0] == service:
                return dict(server)
        return {}


@contextmanager
def cluster(folder: Path, model: str) -> Iterator[Cluster]:
    """Bring it up; take it down whatever happens. `folder` is for its secrets; `model` is `tiny` or a known name."""
    port = _free_port()
    secrets = folder / "secrets"
    run([str(ROOT / "deploy/secrets"), str(secrets)], within_s=10)
    environ = {
        "DEPLOY_IMAGE": IMAGE,
        "DEPLOY_MODEL": "/models/tiny" if model == "tiny" else model,
        "DEPLOY_PUBLISH": f"127.0.0.1:{port}",
        "DEPLOY_SECRETS": str(secrets),
    }
    words = (*_compose_command(), "--project-name", PROJECT, "--file", str(ROOT / "deploy/compose.yaml"))
    running = Cluster(words, environ, port, (secrets / "api-keys").read_text().split()[0])
    running.compose("down", "--volumes", "--remove-orphans", within_s=_DOWN_S)  # what a killed trial left
    try:
        if model == "tiny":
            running.compose("run", "--rm", "--entrypoint", "python3", "model", "-c", _MAKE_TINY, within_s=_UP_S)
        running.compose("up", "--detach", "--no-build", within_s=_UP_S)
        yield running
    except TrialFailed:
        _show_logs(running)
        raise
    finally:
        running.compose("down", "--volumes", "--remove-orphans", within_s=_DOWN_S)
        say("everything is down")


def _show_logs(running: Cluster) -> None:
    for line in attempt([*running.words, "logs", "--tail=15"], within_s=30, environ=running.environ)[1].splitlines():
        print(f"    {line}")


def _compose_command() -> tuple[str, ...]:
    """The plugin, or the program that was there before it."""
    for words in (("docker", "compose"), ("docker-compose",)):
        if attempt([*words, "version"], within_s=20)[0] == 0:
            return words
    install("docker-compose")
    return ("docker-compose",)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def default_cache() -> Path:
    """Where trials keep what takes long to make."""
    home = os.environ.get("KVLEASE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "kvlease"
    return Path(home).expanduser() / "containers"
