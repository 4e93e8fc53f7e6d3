"""Figures of the server for Prometheus."""

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """Counters, times and gauges of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        given: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "sparrow_requests", "Requests by route and status.", ("route", "status"), **given
        )
        self.prompt_tokens = Counter("sparrow_prompt_tokens", "Tokens of prompts.", **given)
        self.cached_tokens = Counter(
            "sparrow_cached_prompt_tokens", "Those of them that cached pages held.", **given
        )
        self.completion_tokens = Counter(
            "sparrow_completion_tokens", "Sampled tokens by decoding.", ("decoding",), **given
        )
        self.first_token = Histogram(
            "sparrow_time_to_first_token_seconds",
            "From the request to its first token, of streamed requests.",
            buckets=SECONDS,
            **given,
        )
        self.seconds = Histogram(
            "sparrow_request_seconds", "From the request to its end.", buckets=SECONDS, **given
        )
        self.disconnects = Counter("sparrow_disconnects", "Clients that left early.", **given)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge that is read when it is asked for."""
        Gauge(f"sparrow_{name}", text, registry=self.registry).set_function(value)

    def render(self) -> bytes:
        """The figures in the text format of Prometheus."""
        return generate_latest(self.registry)
