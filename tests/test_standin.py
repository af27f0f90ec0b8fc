"""While no server listens: every request is answered 503 at once, whatever others do, and the port is given up."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from engine_server import EngineServer, wait_until

from llama_phase import standin as standin_module
from llama_phase.companions import PortStandin
from llama_phase.port import check_port, free_port
from llama_phase.running_servers import birth_of
from llama_phase.settings import Settings
from llama_phase.standin import Standin, standin_for, tls_of
from llama_phase.supervisor_status import SupervisorStatus

HOST = "127.0.0.1"


@pytest.fixture
def standin() -> Iterator[Standin]:
    with Standin([HOST], free_port(HOST)) as it:
        assert it.open()
        yield it


def url(standin: Standin) -> str:
    return f"http://{HOST}:{standin._port}"


def connect(standin: Standin, data: bytes = b"") -> socket.socket:
    client = socket.create_connection((HOST, standin._port), timeout=10)
    client.sendall(data)
    return client


def read_all(client: socket.socket) -> bytes:
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/health", "/v1/chat/completions"])
def test_every_request_is_answered_in_the_servers_own_form(standin: Standin, method: str, path: str) -> None:
    standin.say("restarting after a crash: signal SIGSEGV", 2.1)
    answer = httpx.request(method, url(standin) + path, trust_env=False)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "3")
    assert answer.json() == {
        "error": {"code": 503, "message": "restarting after a crash: signal SIGSEGV", "type": "unavailable_error"}
    }


def test_head_has_no_body(standin: Standin) -> None:
    answer = httpx.head(url(standin), trust_env=False)
    assert (answer.status_code, answer.content) == (503, b"")


def test_a_long_body_does_not_lose_the_answer(standin: Standin) -> None:
    assert httpx.post(url(standin), content=b"x" * (8 << 20), trust_env=False).status_code == 503


def test_what_is_not_http_is_refused(standin: Standin) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * (200 << 10)):
        with connect(standin, data) as client:
            assert read_all(client).startswith(b"HTTP/1.1 400 ")


def test_clients_that_send_nothing_or_go_away_hold_nobody_up(standin: Standin) -> None:
    slow = [connect(standin, data) for data in (b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: x\r\n") for _ in range(20)]
    for _ in range(20):
        connect(standin, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc").close()
    answer = httpx.get(url(standin), trust_env=False, timeout=2)
    assert answer.status_code == 503
    for client in slow:
        client.close()


def test_beyond_the_limit_the_oldest_gives_way(monkeypatch: pytest.MonkeyPatch, standin: Standin) -> None:
    monkeypatch.setattr(standin_module, "MAX_CLIENTS", 4)
    clients = [connect(standin) for _ in range(12)]
    wait_until(lambda: len(standin._clients) == 4, "only four are kept")
    assert httpx.get(url(standin), trust_env=False).status_code == 503
    for client in clients:
        client.close()


def test_a_silent_client_is_dropped_after_a_while(monkeypatch: pytest.MonkeyPatch, standin: Standin) -> None:
    monkeypatch.setattr(standin_module, "HEAD_S", 0.1)
    with connect(standin, b"GET / HT") as client, contextlib.suppress(ConnectionResetError):
        assert read_all(client) == b""


def test_the_port_is_free_once_it_is_closed_even_with_clients_connected(
    standin: Standin, capfd: pytest.CaptureFixture[str]
) -> None:
    clients = [connect(standin, data) for data in (b"", b"POST / HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(20)]
    httpx.get(url(standin), trust_env=False)
    standin.close()
    check_port([HOST], standin._port)
    assert not standin.is_open
    assert not [thread for thread in threading.enumerate() if thread.name == "llama-phase-standin"]
    standin.close()
    assert capfd.readouterr() == ("", "")
    for client in clients:
        client.close()


def test_it_can_be_opened_and_closed_again_and_again(standin: Standin) -> None:
    for _ in range(50):
        standin.close()
        assert standin.open()
    assert httpx.get(url(standin), trust_env=False).status_code == 503


def test_a_taken_port_is_no_failure_and_none_of_the_hosts_is_held() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        standin = Standin(["127.0.0.2", HOST], port)
        assert not standin.open()
        check_port(["127.0.0.2"], port)
        standin.close()


def test_no_tls_without_a_certificate_and_an_error_for_a_bad_one(tmp_path: Path) -> None:
    assert tls_of(None, None) is None
    with pytest.raises(OSError):
        tls_of(str(tmp_path / "none.pem"), None)
    settings = Settings.load(model="m.gguf", port=1, upstream=["--ssl-cert-file", str(tmp_path / "none.pem")])
    assert not standin_for(settings).open()


def test_when_to_ask_again_does_not_depend_on_the_time_of_day() -> None:
    """The supervisor's times pass evenly, whoever sets the clock of the machine."""
    settings = Settings.load(model="m.gguf", port=free_port(HOST))
    companion = PortStandin()
    for since_s in (1000.0, time.time(), time.time() + 1e6):
        status = SupervisorStatus(
            state="starting",
            since_s=since_s,
            restart_at_s=since_s + 41.5,
            supervisor_pid=os.getpid(),
            supervisor_birth_s=birth_of(os.getpid()) or 0.0,
            clock_offset_s=since_s - time.monotonic(),
        )
        companion.waiting(settings, status)
        try:
            answer = httpx.get(f"{settings.base_url}/health")
        finally:
            companion.close()
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "42")


@pytest.mark.engine
def test_the_server_itself_says_when_to_ask_again_while_it_loads(engine: Path, model_path, tmp_path: Path) -> None:
    seen: list[httpx.Response] = []

    class Watched(EngineServer):
        def _ready(self) -> bool:
            try:
                answer = self.http.get("/v1/models", timeout=5)
            except httpx.TransportError:
                return False
            seen.append(answer)
            return answer.status_code == 200

    start = time.monotonic()
    for number in range(10):  # a tiny model may be loaded before the first question
        server = Watched(engine / "llama-server", model_path("qwen4exp"), log=tmp_path / f"{number}.log")
        server.stop()
        if seen[0].status_code == 503 or time.monotonic() - start > 60:
            break
    assert seen[0].status_code == 503 and int(seen[0].headers["Retry-After"]) > 0
    assert seen[0].json()["error"]["type"] == "unavailable_error"
