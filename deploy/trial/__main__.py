"""The trial itself: up, ask, kill, ask, bring back, ask, down.

Exit status 0: everything held. 1: something did not, and stderr says what. 2: wrong usage. 77: no Docker engine can be had here.

Never: counts an answer as good without reading its text.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.trial.cluster import SERVERS, Answer, Cluster, cluster, default_cache
from deploy.trial.commands import NoEngine, TrialFailed, attempt, complain, run, say, wait_for
from deploy.trial.engine import engine
from deploy.trial.image import IMAGE, build

DEFAULT_MODEL = "smollm2-135m-instruct"
PROMPT, EXPECTED = "The capital of France is", "Paris"
#: One answer, also while a server is dead: the stall of a lease (2 s), a second attempt, and a busy machine's computing.
ANSWER_S = 20.0
#: From the start of the containers to a gateway that can serve, four loads of the model on two cores included.
READY_S = 420.0
#: From a new container to requests that went through it.
BACK_S = 120.0
_HEALTHY_S = 60.0
_ASKED_AT_ONCE = 5
_MAX_HOLDERS = 8
_NO_ENGINE = 77


class Client:
    """Asks the same question again and again; every answer must be 200, in time, and the same text."""

    def __init__(self, running: Cluster, model: str) -> None:
        self._running, self._model = running, model
        self._text = ""
        self.num_answers = 0
        self.slowest_s = 0.0

    def ask(self) -> str:
        """The text. Raises TrialFailed."""
        body = {"model": self._model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        answer = self._running.request("POST", "/v1/completions", body, within_s=ANSWER_S)
        text = self._read(answer)
        if self._model == DEFAULT_MODEL and EXPECTED not in text:
            raise TrialFailed(f"{PROMPT!r} was answered with {text!r}")
        if text != (self._text or text):
            raise TrialFailed(f"the text was {self._text!r}, and is now {text!r}")
        self._text = text
        self.num_answers += 1
        self.slowest_s = max(self.slowest_s, answer.seconds)
        return text

    def _read(self, answer: Answer) -> str:
        if answer.status != 200:
            raise TrialFailed(
                f"a request was answered with {answer.status} after {answer.seconds:.1f} s: {answer.body}"
            )
        choices = answer.json()["choices"]
        assert isinstance(choices, list)
        text = str(choices[0]["text"])
        if not text:
            raise TrialFailed("a request was answered with no text")
        return text

    def summary(self) -> str:
        """Since the last summary."""
        line = f"{self.num_answers} answers, all 200 and the same text, slowest {self.slowest_s:.2f} s"
        self.num_answers, self.slowest_s = 0, 0.0
        return line


def kill_and_bring_back(running: Cluster, client: Client, victim: str) -> None:
    """Requests are answered while `victim` is dead, while it starts, and by it once it is back at another address."""
    before, old_address = running.server(victim), running.address(victim)
    run(["docker", "kill", running.container(victim)], within_s=30)
    for _ in range(_ASKED_AT_ONCE):
        client.ask()
    say(f"{victim} is dead: {client.summary()}")
    running.compose("rm", "--force", victim)
    with address_taken(running.network(), old_address):
        running.compose("up", "--detach", "--no-build", "--no-deps", victim)

        def is_used() -> bool:
            client.ask()
            now = running.server(victim)
            return now.get("incarnation") != before.get("incarnation") and num_blocks(now) > 0

        seconds = wait_for(is_used, within_s=BACK_S, what=f"requests through the {victim} that came back")
        say(f"{victim} came back at {running.address(victim)}, not {old_address}, and was used after {seconds:.1f} s")
    say(f"meanwhile: {client.summary()}")


@contextmanager
def address_taken(network: str, address: str) -> Iterator[None]:
    """While the block lasts, `address` belongs to a container without a service, so that nobody comes back at it."""
    command = ["docker", "run", "--detach", "--rm", "--network", network, "--entrypoint", "sleep", IMAGE, "600"]
    template = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    holders: list[str] = []
    try:
        for _ in range(_MAX_HOLDERS):  # an engine gives the lowest address that is free
            holders.append(run(command, within_s=30).split()[-1])
            if run(["docker", "inspect", "--format", template, holders[-1]], within_s=30).strip() == address:
                break
        else:
            raise TrialFailed(f"{address} could not be taken by another container")
        yield
    finally:
        if holders:
            attempt(["docker", "rm", "--force", *holders], within_s=60)


def num_blocks(server: dict[str, object]) -> int:
    """KV blocks that crossed the pairs of this server, as it says itself."""
    pairs = server.get("pairs")
    return sum(int(pair.get("num_blocks", 0)) for pair in pairs) if isinstance(pairs, list) else 0


def look_at_health(running: Cluster) -> None:
    """Every container's own check says that it is well."""
    for service in SERVERS:
        wait_for(
            lambda service=service: running.inspect(service, "{{.State.Health.Status}}") == "healthy",  # type: ignore[misc]
            within_s=_HEALTHY_S,
            what=f"the health check of {service}",
        )
    say("every container says that it is healthy")


def leave_only_those_that_came_back(running: Cluster, client: Client) -> None:
    """The others die, so that nobody else can have answered."""
    for service in ("prefill-1", "decode-1"):
        run(["docker", "kill", running.container(service)], within_s=30)
    client.ask()
    say(f"with prefill-0 and decode-0 alone, which came back: {client.summary()}")


def trial(running: Cluster, model: str) -> None:
    """Everything that must hold."""
    say(f"ready after {wait_for(running.is_ready, within_s=READY_S, what='a gateway that can serve'):.1f} s")
    client = Client(running, "tiny" if model == "tiny" else model)
    say(f"{PROMPT!r} is answered with {client.ask()!r}")
    for victim in ("prefill-0", "decode-0"):
        kill_and_bring_back(running, client, victim)
    look_at_health(running)
    leave_only_those_that_came_back(running, client)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="deploy/smoke", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--model", choices=("default", "tiny"), default="default", help="tiny: quick, but its text is noise"
    )
    parser.add_argument(
        "--own-engine", action="store_true", help="start a Docker engine for the trial, even if one answers"
    )
    parser.add_argument("--no-build", action="store_true", help=f"take the image {IMAGE} as it is")
    parser.add_argument(
        "--extra-index", default="", metavar="URL", help="one more package index, for a CPU build of torch"
    )
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR", help="default: %(default)s")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is taken down
    model = DEFAULT_MODEL if options.model == "default" else options.model
    options.cache.mkdir(parents=True, exist_ok=True)
    try:
        with (
            engine(options.cache, own=options.own_engine, is_root=os.geteuid() == 0),
            tempfile.TemporaryDirectory(prefix="kvlease-smoke-") as folder,
        ):
            if not options.no_build:
                build(options.cache, options.extra_index)
            with cluster(Path(folder), model) as running:
                trial(running, model)
    except TrialFailed as error:
        complain(error)
        return _NO_ENGINE if isinstance(error, NoEngine) else 1
    say("PASSED")
    return 0


if __name__ == "__main__":
    sys.exit(main())
