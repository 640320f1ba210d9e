"""What is kept of each request: one log line and a handful of numbers.

Never: holds or writes a word of a prompt or an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.cluster import Cluster, ServerView

logger = logging.getLogger(__name__)

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
NEXT_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
CLIENT_LEFT_STATUS = 499
_MS = 1000.0


@dataclass(slots=True)
class RequestRecord:
    """One request, filled in as it goes. Times are of the monotonic clock; `outcome` is a finish reason or an error's code."""

    request_id: str
    api: str
    started_at: float
    tenant: str = ""
    http_status: int = 0
    outcome: str = "client_left"
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None


class Journal:
    """Counts and logs what records say."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the metrics of the gateway's own work."""
        self._requests = Counter(
            "kvlease_requests", "Requests that have ended", ["api", "status", "outcome"], registry=registry
        )
        self._errors = Counter("kvlease_request_errors", "Errors told to clients", ["code"], registry=registry)
        self._in_flight = Gauge("kvlease_requests_in_flight", "Requests between head and last byte", registry=registry)
        self._prompt = Counter("kvlease_prompt_tokens", "Tokens in the prompts of ended requests", registry=registry)
        self._generated = Counter("kvlease_generated_tokens", "Tokens of ended requests", registry=registry)
        self._first = Histogram(
            "kvlease_time_to_first_token_seconds",
            "From the request's head to the first token",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self._next = Histogram(
            "kvlease_time_between_tokens_seconds",
            "Between two arrivals of tokens of one request",
            buckets=NEXT_TOKEN_BUCKETS,
            registry=registry,
        )

    def began(self) -> None:
        """A request's head has arrived."""
        self._in_flight.inc()

    def tokens_arrived(self, record: RequestRecord, now: float) -> None:
        """New tokens of a request are here."""
        if record.last_token_at is None:
            record.first_token_at = now
            self._first.observe(now - record.started_at)
        else:
            self._next.observe(now - record.last_token_at)
        record.last_token_at = now

    def ended(self, record: RequestRecord, now: float) -> None:
        """A request's last byte is out, or its client is gone."""
        self._in_flight.dec()
        self._requests.labels(record.api, str(record.http_status), record.outcome).inc()
        if record.outcome not in ("stop", "length"):
            self._errors.labels(record.outcome).inc()
        self._prompt.inc(record.num_prompt_tokens)
        self._generated.inc(record.num_generated_tokens)
        logger.info("request.finished", extra=_fields(record, now))


def _fields(record: RequestRecord, now: float) -> dict[str, object]:
    first = record.first_token_at
    return {
        "request_id": record.request_id,
        "api": record.api,
        "tenant": record.tenant,
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": record.num_generated_tokens,
        "status": record.http_status,
        "outcome": record.outcome,
        "ttft_ms": None if first is None else round((first - record.started_at) * _MS, 1),
        "total_ms": round((now - record.started_at) * _MS, 1),
    }


class ClusterCollector(Collector):
    """The servers' own numbers, as last polled, at the moment somebody asks for metrics."""

    def __init__(self, cluster: Cluster) -> None:
        """Reads `cluster` when collected."""
        self._cluster = cluster

    def collect(self) -> Iterable[Metric]:
        """One sample a server and state."""
        labels = ["role", "server"]
        up = GaugeMetricFamily("kvlease_server_up", "1 while the server answers its polls", labels=labels)
        queued = GaugeMetricFamily("kvlease_server_queued", "Requests in its queue", labels=labels)
        running = GaugeMetricFamily("kvlease_server_running", "Requests it runs", labels=labels)
        blocks = GaugeMetricFamily("kvlease_server_blocks", "KV blocks by state", labels=[*labels, "state"])
        pairs = GaugeMetricFamily("kvlease_server_pairs", "Pairs by state", labels=[*labels, "transport", "state"])
        events = GaugeMetricFamily("kvlease_server_events", "The server's counters", labels=[*labels, "event"])
        for server in self._cluster.servers:
            up.add_metric([server.role, server.address], float(server.is_in))
            _add_facts(server, queued, running, blocks, pairs, events)
        return (up, queued, running, blocks, pairs, events)


def _add_facts(
    server: ServerView,
    queued: GaugeMetricFamily,
    running: GaugeMetricFamily,
    blocks: GaugeMetricFamily,
    pairs: GaugeMetricFamily,
    events: GaugeMetricFamily,
) -> None:
    facts = server.facts
    if facts is None:
        return
    names = [server.role, server.address]
    queued.add_metric(names, facts.num_queued)
    running.add_metric(names, facts.num_running)
    for state in ("free", "reserved", "filling", "readable", "total"):
        blocks.add_metric([*names, state], getattr(facts, f"blocks_{state}"))
    counted: dict[tuple[str, str], int] = {}
    for pair in facts.pairs:
        counted[pair.transport, pair.state] = counted.get((pair.transport, pair.state), 0) + 1
    for (transport, state), count in counted.items():
        pairs.add_metric([*names, transport, state], count)
    for event, count in facts.counters.items():
        events.add_metric([*names, event], count)
