"""What a service counts, as Prometheus reads it."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Figures:
    """Counters of one service; a registry of its own, so that several may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("kvtool_requests_total", "Requests answered", ["route", "method", "status"], registry=self.registry)
        self.seconds = Histogram(
            "kvtool_request_seconds", "From a request to the end of its answer", ["route"], buckets=SECONDS, registry=self.registry
        )
        self.received = Counter("kvtool_received_bytes_total", "Bytes of objects received and kept", registry=self.registry)
        self.sent = Counter("kvtool_sent_bytes_total", "Bytes of objects sent", registry=self.registry)
        self.lookups = Counter("kvtool_lookups_total", "Look-ups of prompts", ["found"], registry=self.registry)
        self.found_tokens = Counter(
            "kvtool_lookup_tokens_total", "Tokens asked for, by whether a prefix covers them", ["found"], registry=self.registry
        )
        self.removed = Counter("kvtool_removed_objects_total", "Objects removed, by cause", ["cause"], registry=self.registry)
        self.running = Gauge("kvtool_requests_running", "Requests under way", registry=self.registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)
