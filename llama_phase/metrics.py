"""Prometheus metrics of the supervisor, with those of its server merged in, on a port of their own.

The server's /metrics are gone while it is down, which is when one wants to see why: ours are served always. Each scrape
here is one scrape there, and llama-server's rates are since the scrape before, so scrape one of the two.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from llama_phase.errors import UsageError
from llama_phase.port import port_busy
from llama_phase.settings import Settings
from llama_phase.supervisor_status import STATES, SupervisorStatus

PREFIX = "llama_phase_supervisor_"
SCRAPE_S = 5.0  # a server may answer late while it computes a micro-batch
ANSWERING = ("ready", "stopping")
Samples = dict[tuple[str, str], float]


class MetricsServer:
    """Serves ``families`` on every scrape; both callables are called from its threads and must not block for long."""

    def __init__(self, status: Callable[[], SupervisorStatus], server_text: Callable[[], str]):
        """`server_text`: the server's /metrics, asked only while it can answer. May raise OSError or ValueError."""
        self._status, self._server_text = status, server_text
        self._http: Any = None
        self._thread: Any = None

    def start(self, host: str, port: int) -> int:
        """Listen; the port (0: any free one). Raises PortBusy, and UsageError when it cannot be bound otherwise."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(self._status, self._server_text))
        try:
            self._http, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise port_busy(host, port) from None
            raise UsageError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}", fix="choose another metrics_port"
            ) from None
        return int(self._http.server_port)

    def close(self) -> None:
        """Idempotent."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()
            self._http = None


class _Families(Collector):
    def __init__(self, status: Callable[[], SupervisorStatus], server_text: Callable[[], str]):
        self._status, self._server_text = status, server_text

    def collect(self) -> Iterator[Metric]:
        status, text = self._status(), ""
        if status.state in ANSWERING:
            with contextlib.suppress(OSError, ValueError):
                text = self._server_text()
        yield from families(status, text)


def families(status: SupervisorStatus, server_text: str) -> Iterator[Metric]:
    """Ours, what is derived from the server's, and the server's own; `server_text` is empty when it gave none."""
    theirs = _parse(server_text)
    yield from _of_supervisor(status, answered=bool(theirs))
    yield from _derived({(s.name, _label(s.labels)): s.value for family in theirs for s in family.samples})
    for family in theirs:
        if not family.name.startswith(PREFIX):
            yield family


def text(status: SupervisorStatus, server_text: str) -> str:
    """The same in Prometheus' text format."""

    class Once(Collector):
        def collect(self) -> Iterator[Metric]:
            return families(status, server_text)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once())
    return generate_latest(registry).decode()


def read_server(settings: Settings) -> str:
    """/metrics of the server of these settings. Raises OSError when there is no good answer."""
    import httpx

    headers = {"Authorization": f"Bearer {settings.probe_key}"} if settings.probe_key else {}
    try:
        # certificates of a loopback server are its owner's own
        answer = httpx.get(
            settings.base_url + "/metrics", headers=headers, timeout=SCRAPE_S, verify=False, trust_env=False
        )
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise OSError(str(error)) from None
    return answer.text


def _of_supervisor(status: SupervisorStatus, *, answered: bool) -> Iterator[Metric]:
    state = GaugeMetricFamily(PREFIX + "state", "1 for the state the supervisor is in.", labels=["state"])
    for name in STATES:
        state.add_metric([name], status.state == name)
    yield state
    info = InfoMetricFamily(PREFIX + "server", "What is served.")
    info.add_metric([], {"model": status.model, "engine": status.engine, "configuration": status.configuration})
    yield info
    failures = CounterMetricFamily(PREFIX + "restarts_by_reason", "Restarts by kind of failure.", labels=["kind"])
    for kind, count in sorted(status.restarts_by_reason.items()):
        failures.add_metric([kind], count)
    yield CounterMetricFamily(PREFIX + "restarts", "Restarts of the server.", value=status.restarts)
    yield failures
    yield CounterMetricFamily(
        PREFIX + "rollbacks", "Changes to the last configuration that served.", value=status.rollbacks
    )
    gauges: dict[str, tuple[str, float | None]] = {
        "server_metrics_read": ("1 when the server's own metrics follow.", answered),
        "rolled_back": ("1 while another configuration serves than the one asked for.", status.rolled_back is not None),
        "state_since_seconds": ("When the state began, seconds since the epoch.", status.since_s),
        "started_seconds": ("When the supervisor began, seconds since the epoch.", status.started_s),
        "restart_at_seconds": ("When the next attempt is due, seconds since the epoch.", status.restart_at_s),
        "load_seconds": ("How long the server took to load.", status.load_s),
        "probe_seconds": ("How long its probe prompt took.", status.probe_s),
    }
    for name, (about, value) in gauges.items():
        if value is not None:
            yield GaugeMetricFamily(PREFIX + name, about, value=value)


def _derived(samples: Samples) -> Iterator[Metric]:
    """Hit rate and device memory by role, of what the engine reports."""
    looked_up = samples.get(("llama_phase_expert_lookups_total", ""), 0.0)
    if looked_up:
        missed = samples.get(("llama_phase_expert_misses_total", ""), 0.0)
        about = "Share of looked up experts that were in a slot, since the server started."
        yield GaugeMetricFamily("llama_phase_expert_hit_ratio", about, value=1 - min(missed, looked_up) / looked_up)
    phase = "prefill" if samples.get(("llama_phase_prefill", "")) else "decode"
    roles = {
        "slots": samples.get(("llama_phase_slot_bytes", "")),
        "ring": samples.get(("llama_phase_ring_bytes", "")),
        "compute": samples.get(("llama_phase_compute_buffer_bytes", phase)),
    }
    known = {role: size for role, size in roles.items() if size is not None}
    if known:
        vram = GaugeMetricFamily(
            "llama_phase_device_bytes", "Device memory that changes with the phase, now.", labels=["role"]
        )
        for role, size in known.items():
            vram.add_metric([role], size)
        yield vram


def _label(labels: dict[str, str]) -> str:
    """Value of the only label; of several, or none, an empty text."""
    return next(iter(labels.values())) if len(labels) == 1 else ""


def _parse(server_text: str) -> list[Metric]:
    # llama-server has counters without _total, which the library would rename; they are maxima, so gauges
    named = re.sub(r"(?m)^(# TYPE (?!\S+_total )\S+) counter$", r"\1 gauge", server_text)
    try:
        return list(text_string_to_metric_families(named))
    except (ValueError, KeyError, IndexError):
        return []
