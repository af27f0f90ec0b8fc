"""The supervisor's metrics are there whatever its server does, and the server's are in them unchanged."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
from test_phase_routes import parse_prometheus

from llama_phase import metrics
from llama_phase.errors import PortBusy, UsageError
from llama_phase.metrics import MetricsServer
from llama_phase.settings import Settings
from llama_phase.supervisor_status import Failure, Rollback, SupervisorStatus

HOST = "127.0.0.1"
READY = SupervisorStatus(state="ready", model="m.gguf", restarts=3, restarts_by_reason={"signal": 2, "hang": 1})
SERVER = """\
# HELP llamacpp:n_decode_total Calls
# TYPE llamacpp:n_decode_total counter
llamacpp:n_decode_total 7
# HELP llamacpp:n_tokens_max Longest
# TYPE llamacpp:n_tokens_max counter
llamacpp:n_tokens_max 5
# HELP llama_phase_expert_lookups_total x
# TYPE llama_phase_expert_lookups_total counter
llama_phase_expert_lookups_total 200
# HELP llama_phase_expert_misses_total x
# TYPE llama_phase_expert_misses_total counter
llama_phase_expert_misses_total 50
# HELP llama_phase_slot_bytes x
# TYPE llama_phase_slot_bytes gauge
llama_phase_slot_bytes 1000
# HELP llama_phase_prefill x
# TYPE llama_phase_prefill gauge
llama_phase_prefill 1
# HELP llama_phase_compute_buffer_bytes x
# TYPE llama_phase_compute_buffer_bytes gauge
llama_phase_compute_buffer_bytes{phase="decode"} 10
llama_phase_compute_buffer_bytes{phase="prefill"} 20
# HELP llama_phase_swap_seconds x
# TYPE llama_phase_swap_seconds histogram
llama_phase_swap_seconds_bucket{direction="enter",le="0.1"} 1
llama_phase_swap_seconds_bucket{direction="enter",le="+Inf"} 2
llama_phase_swap_seconds_sum{direction="enter"} 0.5
llama_phase_swap_seconds_count{direction="enter"} 2
"""


def samples(status: SupervisorStatus, text: str = "") -> dict[str, float]:
    return parse_prometheus(metrics.text(status, text))


def test_what_the_supervisor_counts() -> None:
    values = samples(READY)
    assert values['llama_phase_supervisor_state{state="ready"}'] == 1
    assert sum(value for name, value in values.items() if name.startswith("llama_phase_supervisor_state{")) == 1
    assert values["llama_phase_supervisor_restarts_total"] == 3
    assert values['llama_phase_supervisor_restarts_by_reason_total{kind="signal"}'] == 2
    assert values["llama_phase_supervisor_rolled_back"] == values["llama_phase_supervisor_server_metrics_read"] == 0
    assert "llama_phase_supervisor_load_seconds" not in values


def test_a_rollback_and_a_pending_restart_show() -> None:
    failure = Failure(kind="oom", text="out of memory", at_s=1.0)
    status = SupervisorStatus(
        state="starting", restart_at_s=9.0, rollbacks=1, rolled_back=Rollback("a", "b", "oom", 1.0), failure=failure
    )
    values = samples(status)
    assert values["llama_phase_supervisor_rolled_back"] == values["llama_phase_supervisor_rollbacks_total"] == 1
    assert values["llama_phase_supervisor_restart_at_seconds"] == 9


def test_the_servers_metrics_are_in_it_as_they_were() -> None:
    values = samples(READY, SERVER)
    assert parse_prometheus(SERVER).items() <= values.items()
    assert values["llama_phase_supervisor_server_metrics_read"] == 1


def test_hit_rate_and_memory_by_role_follow_from_what_the_engine_reports() -> None:
    values = samples(READY, SERVER)
    assert values["llama_phase_expert_hit_ratio"] == 0.75
    assert values['llama_phase_device_bytes{role="slots"}'] == 1000
    assert values['llama_phase_device_bytes{role="compute"}'] == 20  # of the phase it is in
    assert 'llama_phase_device_bytes{role="ring"}' not in values
    assert not [name for name in samples(READY) if "hit_ratio" in name or "device_bytes" in name]


@pytest.mark.parametrize("text", ["<html>", "llamacpp:x{ 1\n", "a b c d e\n", '{"error": {"code": 503}}'])
def test_an_answer_that_is_no_metrics_costs_only_itself(text: str) -> None:
    assert samples(READY, text)["llama_phase_supervisor_restarts_total"] == 3


class World:
    """A supervisor's state, and a server that can be down."""

    status = READY
    asked = 0

    def server_text(self) -> str:
        self.asked += 1
        if self.status.failure:
            raise ConnectionRefusedError
        return SERVER


@pytest.fixture
def world() -> Iterator[tuple[World, str]]:
    world = World()
    server = MetricsServer(lambda: world.status, world.server_text)
    port = server.start(HOST, 0)
    yield world, f"http://{HOST}:{port}/metrics"
    server.close()
    server.close()


def test_it_is_served_while_the_server_is_up_and_when_it_died(world: tuple[World, str]) -> None:
    state, url = world
    answer = httpx.get(url, trust_env=False)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    assert parse_prometheus(answer.text)["llamacpp:n_decode_total"] == 7
    # it died, and the supervisor has not noticed yet
    state.status = SupervisorStatus(state="ready", failure=Failure(kind="signal", text="", at_s=0.0))
    values = parse_prometheus(httpx.get(url, trust_env=False).text)
    assert values["llama_phase_supervisor_server_metrics_read"] == 0 and "llamacpp:n_decode_total" not in values
    asked = state.asked
    state.status = SupervisorStatus(state="starting")
    assert parse_prometheus(httpx.get(url, trust_env=False).text)['llama_phase_supervisor_state{state="starting"}'] == 1
    assert state.asked == asked, "a server that is loading has no metrics"


def test_a_busy_port_is_said_with_its_holder() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen(1)
        with pytest.raises(PortBusy, match="pid"):
            MetricsServer(lambda: READY, str).start(HOST, taken.getsockname()[1])
    with pytest.raises(UsageError):
        MetricsServer(lambda: READY, str).start("192.0.2.1", 0)


@pytest.mark.engine
def test_with_the_real_server(one_server, prompt) -> None:
    server = one_server("qwen3moe", "--no-repack", EXPERT_SLOTS="auto")
    server.complete(prompt("qwen3moe", 300), n=8)
    settings = Settings.load(model="m.gguf", port=server.port)
    values = samples(READY, metrics.read_server(settings))
    assert values["llama_phase_entered_total"] == 1 and values['llama_phase_swap_seconds_count{direction="enter"}'] == 1
    assert 0 < values["llama_phase_expert_hit_ratio"] < 1
    assert (
        values['llama_phase_device_bytes{role="slots"}'] > 0 and values['llama_phase_device_bytes{role="compute"}'] > 0
    )
    assert parse_prometheus(server.metrics_text()).keys() <= values.keys()
    server.stop()
    with pytest.raises(OSError):
        metrics.read_server(settings)
