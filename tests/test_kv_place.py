"""K/V in host memory gives the answers of K/V on the device, bit for bit, tokens and log-probabilities, at the same
split. The device of the CPU engine is host memory too, but the buffers, the copies for long batches and all that saves,
moves and drops rows are those of a GPU.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_server import (
    DECODE_UBATCH,
    MIN_TOKENS,
    PHASE_BIN,
    SOME_OF_FOUR,
    Answer,
    EngineServer,
    Fleet,
    assert_same_but_for_ties,
    both,
    clean_environment,
    drafts_of,
    mtp,
    phase_environment,
    server_args,
)

pytestmark = pytest.mark.engine

HOST = {"LLAMA_PHASE_KV": "host"}  # LLAMA_PHASE_SELECT=auto is fast then; on the device, without phases, it is stock
# the same batches as without
PHASES = {
    "LLAMA_PHASE_PREFILL_MODE": "bypass",
    "LLAMA_PHASE_PREFILL_UBATCH": "1024",
    "LLAMA_PHASE_PREFILL_MIN_TOKENS": "8000",
}
SPARSE = ["qwen4exp", "qwen4exp-no-ple-exact"]


class KvFleet(Fleet):
    def host(self, model: str, *args: str, env: dict[str, str] | None = None, **sizes: int) -> EngineServer:
        sizes = {"ubatch": DECODE_UBATCH, "ctx": 8192} | sizes
        return self._get(PHASE_BIN, model, (*server_args(**sizes), *args), HOST | (env or {}))

    def device(self, model: str, *args: str, env: dict[str, str] | None = None, **sizes: int) -> EngineServer:
        sizes = {"ubatch": DECODE_UBATCH, "ctx": 8192} | sizes
        return self._get(PHASE_BIN, model, (*server_args(**sizes), *args), env or {})


@pytest.fixture(scope="module")
def servers(engine, model_path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvFleet]:
    fleet = KvFleet(model_path, tmp_path_factory.mktemp("kv"))
    yield fleet
    fleet.close()


def places(server: EngineServer, member: int = 0) -> dict[str, Any]:
    return server.phase()["kv"]["contexts"][member]


def rows_found(server: EngineServer, member: int = 0) -> tuple[int, int]:
    """Positions that attention read of layers whose rows are kept as well, and how many had to be copied first."""
    kept = [layer["rows"] for layer in places(server, member)["layers"] if "rows" in layer]
    return sum(rows["looked_up"] for rows in kept), sum(rows["missed"] for rows in kept)


def answers_of_one_request(server: EngineServer, prompts: list[list[int]]) -> list[Answer]:
    replies = server.post(prompts, 16).json()
    return [Answer.of(reply) for reply in sorted(replies, key=lambda reply: reply["index"])]


def metric(server: EngineServer, name: str) -> float:
    (line,) = (line for line in server.metrics_text().splitlines() if line.startswith(f"llama_phase_{name} "))
    return float(line.split()[-1])


@pytest.mark.parametrize(
    ("model", "args", "env", "select"),
    [
        ("qwen4exp", (), {}, "fast"),
        ("qwen4exp", (), {"LLAMA_PHASE_SELECT": "stock"}, "stock"),
        ("qwen4exp", (), {"LLAMA_PHASE_KV": "auto"}, "stock"),
        ("qwen4exp", (), {"LLAMA_PHASE_KV": "auto", "LLAMA_PHASE_SELECT": "fast"}, "fast"),
        ("qwen4exp", (), {"LLAMA_PHASE_KV": "auto", **PHASES}, "fast"),
        ("qwen4exp", (), {"LLAMA_PHASE_KV": "auto", "LLAMA_PHASE_SELECT": "stock", **PHASES}, "stock"),
        ("qwen4exp", ("-ctk", "q8_0", "-ctv", "q8_0"), {}, "stock"),
        ("qwen3moe", (), {"LLAMA_PHASE_KV": "host-all"}, "stock"),
    ],
)
def test_rows_are_selected_fast_where_there_are_phases_or_their_kv_is_in_host_memory(
    servers: KvFleet, prompt, model: str, args: tuple[str, ...], env: dict[str, str], select: str
) -> None:
    """`auto` goes by where the K/V of sparse layers is, not by where it was asked for; what is chosen never differs."""
    server = servers.host(model, *args, env=env)
    assert server.phase()["kv"]["select"] == select
    of_host, of_device = both(server, servers.device(model, *args), prompt(model, 2500), n=20)
    assert of_host == of_device


@pytest.mark.parametrize("n", [1, 9, 1000, 5000])
@pytest.mark.parametrize("model", SPARSE)
def test_host_equals_device(servers: KvFleet, prompt, model: str, n: int) -> None:
    """From one row to far past what the indexer selects; 9 tokens are the fewest that read a copy."""
    host, device = servers.host(model), servers.device(model)
    of_host, of_device = both(host, device, prompt(model, n), n=40)
    assert of_host == of_device
    assert places(host)["host_bytes"] > 0 == places(host)["device_bytes"]


def test_a_prompt_of_40000_tokens(servers: KvFleet, prompt) -> None:
    """And a second turn, whose rows are found among 4096 kept ones or not."""
    model, sizes = "qwen4exp-thin", {"ubatch": 512, "batch": 2048, "ctx": 40960}
    host = servers.host(model, env={"LLAMA_PHASE_KV_ROWS": "4096"}, **sizes)
    device = servers.device(model, **sizes)
    first = list(prompt(model, 40000))
    of_host, of_device = both(host, device, first, n=40, cache=True)
    assert of_host == of_device
    of_host, of_device = both(host, device, [*first, *of_host.tokens, *prompt(model, 30, seed=2)], n=40, cache=True)
    assert of_host == of_device and of_host.n_cached == of_device.n_cached >= 40000
    looked_up, missed = rows_found(host)
    assert 0 < missed <= looked_up


@pytest.mark.parametrize(("model", "chunk"), [("qwen4exp", "0"), ("qwen4exp", "100"), ("qwen4exp-no-ple-exact", "0")])
def test_phases(servers: KvFleet, prompt, model: str, chunk: str) -> None:
    """Two micro-batches, entered and left; both servers switch. In chunks, all of a micro-batch's read one copy."""
    env = phase_environment(CHUNK=chunk)
    host, device = servers.host(model, env=env), servers.device(model, env=env)
    for n in (3000, 40, MIN_TOKENS):
        of_host, of_device = both(host, device, prompt(model, n, seed=n), n=20)
        assert of_host == of_device
    assert host.counters()["entered"] == device.counters()["entered"] == 2


@pytest.mark.parametrize(("n_draft", "longest"), [(1, 2500), (7, 5000)])
def test_verify_batches(servers: KvFleet, prompt, n_draft: int, longest: int) -> None:
    """The draft's layer has K/V of its own, in host memory too."""
    model, args = "qwen4exp", mtp(n_draft)
    host, device = servers.host(model, *args), servers.device(model, *args)
    for n in (5, longest):
        of_host, of_device = both(host, device, prompt(model, n), n=40)
        assert of_host == of_device
        assert of_host.timings["draft_n"] == of_device.timings["draft_n"] > 0
    assert [context["host_bytes"] > 0 for context in host.phase()["kv"]["contexts"]] == [True, True]


@pytest.mark.parametrize("unified", ["-kvu", "-no-kvu"])
def test_four_slots(servers: KvFleet, prompt, unified: str) -> None:
    """At once, one stream for all or one for each; a slot's prompt is far past what the indexer selects."""
    model, sizes = "qwen4exp-no-ple-exact", {"ctx": 4 * 3072, "parallel": 4}
    host, device = servers.host(model, unified, **sizes), servers.device(model, unified, **sizes)
    prompts = [prompt(model, n, seed=n) for n in (2500, 30, 1200, 9)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda tokens: host.complete(tokens, n=16), prompts))
    for tokens, answer in zip(prompts, answers, strict=True):
        assert_same_but_for_ties(answer.tokens, device.complete(tokens, n=16))


@pytest.mark.parametrize(
    ("model", "unified", "rows"),
    [
        ("qwen4exp", "-kvu", "1500"),
        ("qwen4exp", "-no-kvu", "0"),
        ("qwen4exp-no-ple-exact", "-no-kvu", "1500"),
        ("qwen4exp-no-ple-exact", "-kvu", "0"),
    ],
)
def test_four_prompts_of_one_request(servers: KvFleet, prompt, model: str, unified: str, rows: str) -> None:
    """Their answers share their batches, the same ones every time: bit for bit, log-probabilities included, also of a
    model whose answers depend on the batch."""
    sizes = {"ctx": 4 * 2048, "parallel": 4}
    host = servers.host(model, unified, env={"LLAMA_PHASE_KV_ROWS": rows}, **sizes)
    device = servers.device(model, unified, **sizes)
    prompts = [list(prompt(model, n, seed=n)) for n in (1500, 30, 700, 9)]
    with ThreadPoolExecutor(2) as pool:
        of_host, of_device = pool.map(lambda server: answers_of_one_request(server, prompts), (host, device))
    assert of_host == of_device
    assert all(len(answer.tokens) == len(answer.logprobs) == 16 for answer in of_host)
    if rows != "0":
        assert rows_found(host)[1] > 0


@pytest.mark.parametrize("saved_on_host", [True, False])
def test_a_saved_state_moves_between_places(servers: KvFleet, prompt, tmp_path, saved_on_host: bool) -> None:
    """Saved with K/V in one place and restored into the other: the answer of a slot that was never saved."""
    model = "qwen4exp"
    context = prompt(model, 1500)
    question = [*context, *prompt(model, 30, seed=3)]
    started = []
    try:
        for env in (HOST, {}):
            args = (*server_args(DECODE_UBATCH, ctx=4096), "--slot-save-path", str(tmp_path))
            started.append(servers.fresh(model, *args, env=env))
        one, other = started if saved_on_host else reversed(started)
        one.complete(context, n=1)
        assert one.http.post("/slots/0?action=save", json={"filename": "context"}).status_code == 200
        undisturbed = one.complete(question, cache=True)
        other.complete(prompt(model, 300, seed=2), n=1)
        assert other.http.post("/slots/0?action=restore", json={"filename": "context"}).status_code == 200
        restored = other.complete(question, cache=True)
    finally:
        for server in started:
            server.stop()
    assert restored.n_cached == undisturbed.n_cached > 0
    assert restored == undisturbed


@pytest.mark.parametrize("model", SPARSE)
def test_growing_conversation(servers: KvFleet, prompt, model: str) -> None:
    """Prefix reuse, checkpoints, and going back to a fork."""
    host, device = servers.host(model), servers.device(model)
    history: list[int] = []
    for turn, n_new in enumerate((1500, 20, 300, 1)):
        history += prompt(model, n_new, seed=20 + turn)
        of_host, of_device = both(host, device, history, n=8, cache=turn > 0)
        assert of_host == of_device, f"turn {turn + 1}"
        assert of_host.n_cached == of_device.n_cached and (turn == 0 or of_host.n_cached > 0)
        history += of_host.tokens
    for length in (1600, 900):
        fork = [*history[:length], *prompt(model, 50, seed=length)]
        of_host, of_device = both(host, device, fork, cache=True)
        assert of_host == of_device
        assert of_host.n_cached == of_device.n_cached
        # behind the checkpoint of the first turn it is restored, before it nothing can be
        assert 1000 < of_host.n_cached < 1600 if length == 1600 else of_host.n_cached == 0


def test_host_prompt_cache(servers: KvFleet, prompt) -> None:
    """Two conversations in turn in one slot, so that each is put aside and brought back."""
    model, args = "qwen4exp", ("--cache-ram", "256", "--cache-idle-slots")
    host, device = servers.host(model, *args), servers.device(model, *args)
    histories: list[list[int]] = [[], []]
    for turn, n_new in enumerate((1300, 40)):
        for i, history in enumerate(histories):
            history += prompt(model, n_new, seed=40 + 10 * i + turn)
            of_host, of_device = both(host, device, history, n=8, cache=True)
            assert of_host == of_device, f"conversation {i}, turn {turn + 1}"
            assert turn == 0 or of_host.n_cached > 0
            history += of_host.tokens


def test_context_shift_of_a_dense_model(servers: KvFleet, prompt) -> None:
    """Forced: the shift rotates the rows in place. Generation runs over the end of the context."""
    model, env = "qwen3moe", {"LLAMA_PHASE_KV": "host-all"}
    host = servers.host(model, "--context-shift", env=env, ctx=1024)
    device = servers.device(model, "--context-shift", ctx=1024)
    of_host, of_device = both(host, device, prompt(model, 800), n=400)
    assert len(of_host.tokens) == 400, "more than the context holds"
    assert of_host == of_device
    assert places(host)["device_bytes"] == 0


def test_qwen4exp_shifts_no_context(servers: KvFleet, prompt) -> None:
    """Upstream shifts none whose positions have several parts: it says so, and the answer ends where the context does,
    with K/V on the host as on the device."""
    model, sizes = "qwen4exp", {"ctx": 1024}
    host, device = (place(model, "--context-shift", **sizes) for place in (servers.host, servers.device))
    of_host, of_device = both(host, device, prompt(model, 800), n=400)
    assert len(of_host.tokens) == 1024 - 800, "no more than the context holds"
    assert of_host == of_device and places(host)["device_bytes"] == 0
    for server in (host, device):
        assert "KV cache shifting is not supported for this context" in server.log_text()


@pytest.mark.parametrize(
    ("model", "args", "reason"),
    [
        ("qwen3moe", (), "dense attention would read"),
        ("qwen4exp", ("-ctk", "q8_0"), "only f16 K/V is read in place"),
        ("qwen4exp", ("-fa", "off"), "without flash attention"),
    ],
)
def test_what_cannot_be_read_in_place_stays_on_the_device(servers: KvFleet, model: str, args, reason: str) -> None:
    server = servers.host(model, *args)
    assert places(server)["host_bytes"] == 0 < places(server)["device_bytes"]
    assert all(reason in layer["reason"] for layer in places(server)["layers"])
    assert reason in server.log_text()
    assert 'llama_phase_kv_bytes{place="host"} 0' in server.metrics_text()


def test_memory_that_cannot_be_had(engine, model_path) -> None:
    """The process ends and says how much was asked for, and what to do."""
    args = ["-m", model_path("qwen4exp"), *server_args(DECODE_UBATCH), "--port", 0, "-ngl", 0, "--no-warmup"]
    ended = subprocess.run(
        [str(part) for part in (PHASE_BIN / "llama-server", *args)],
        env=clean_environment(HOST | {"LLAMA_PHASE_FAULT": "kv.allocate"}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode != 0
    assert "no 4 MiB of host memory for K/V" in ended.stderr + ended.stdout
    assert "LLAMA_PHASE_KV=device" in ended.stderr + ended.stdout


# Positions that the device keeps as well; an attention layer of these models picks up to 259 per token. 300: the oldest
# go, and a verify batch may need more than there are; 100: too few for any token past them; 8192: each has its own.
ROWS = ["300", "100", "8192"]


@pytest.mark.parametrize("rows", ROWS)
def test_kept_rows_are_the_rows(servers: KvFleet, prompt, rows: str) -> None:
    """A conversation that grows, forks and goes back; the answers are those of K/V on the device."""
    model = "qwen4exp-no-ple-exact"
    host, device = servers.host(model, env={"LLAMA_PHASE_KV_ROWS": rows}), servers.device(model)
    history: list[int] = []
    for turn, n_new in enumerate((50, 700, 20, 300, 9, 1)):
        history += prompt(model, n_new, seed=60 + turn)
        of_host, of_device = both(host, device, history, n=40, cache=turn > 0)
        assert of_host == of_device, f"turn {turn + 1}"
        history += of_host.tokens
    for length in (900, 200):
        fork = [*history[:length], *prompt(model, 50, seed=length)]
        of_host, of_device = both(host, device, fork, n=40, cache=True)
        assert of_host == of_device
    looked_up, missed = rows_found(host)
    assert 0 < missed < looked_up
    layers = places(host)["layers"]
    assert metric(host, 'kv_bytes{place="host"}') == places(host)["host_bytes"] > 0
    assert metric(host, 'kv_bytes{place="device"}') == 0
    assert metric(host, "kv_rows") == len(layers) * int(rows) > 0
    assert metric(host, "kv_rows_looked_up_total") == looked_up
    assert metric(host, "kv_rows_missed_total") == missed


def test_kept_rows_with_several_threads(servers: KvFleet, prompt) -> None:
    """One of them keeps the rows."""
    model, threads = "qwen4exp", ("-t", "2", "-tb", "2")
    asleep = {"OMP_WAIT_POLICY": "passive"}  # else they spin at each barrier, minutes where cores are busy
    host = servers.host(model, *threads, env={"LLAMA_PHASE_KV_ROWS": "300"} | asleep)
    device = servers.device(model, *threads, env=asleep)
    assert host.complete(prompt(model, 700), n=20) == device.complete(prompt(model, 700), n=20)
    assert rows_found(host)[0] > 0


@pytest.mark.parametrize("rows", ROWS)
def test_kept_rows_in_verify_batches(servers: KvFleet, prompt, rows: str) -> None:
    """2 to 8 queries look up the union of their rows, where that fits."""
    model, args = "qwen4exp", mtp(7)
    host, device = servers.host(model, *args, env={"LLAMA_PHASE_KV_ROWS": rows}), servers.device(model, *args)
    for n in (5, 1500, 40):
        of_host, of_device = both(host, device, prompt(model, n), n=40)
        assert of_host == of_device
    assert rows_found(host)[0] > 0


@pytest.mark.parametrize("rows", ["300", "8192"])
@pytest.mark.parametrize("n_draft", [0, 3])
def test_beside_expert_slots(servers: KvFleet, prompt, n_draft: int, rows: str) -> None:
    """What the product is for: experts and K/V in host memory, slots, ring and kept rows on the device, phases."""
    model = "qwen4exp"
    slots = phase_environment(EXPERT_SLOTS="16", EXPERT_BATCH="4", RING="2")
    args = ("--no-repack", *(mtp(n_draft) if n_draft else ()))
    host = servers.host(model, *args, env=slots | {"LLAMA_PHASE_KV_ROWS": rows})
    device = servers.device(model, *args, env=phase_environment())
    for n in (5, 1300, 7, 3000):
        of_host, of_device = both(host, device, prompt(model, n, seed=n), n=40)
        assert of_host == of_device, n
    state = host.phase()
    assert [member["host_bytes"] > 0 for member in state["kv"]["contexts"]] == [True] * (1 + bool(n_draft))
    assert all(member["slots"]["looked_up"] > member["slots"]["missed"] > 0 for member in state["experts"])
    assert state["experts"][0]["ring"]["layers_streamed"] > 0 and rows_found(host)[0] > 0
    assert (state["counters"]["entered"], state["counters"]["rolled_back"]) == (2, 0)


@pytest.mark.parametrize("unified", ["-kvu", "-no-kvu"])
def test_kept_rows_of_four_slots(servers: KvFleet, prompt, unified: str) -> None:
    """At once; then one after the other, over what the others left."""
    model, sizes = "qwen4exp-no-ple-exact", {"ctx": 4 * 2048, "parallel": 4}
    host = servers.host(model, unified, env={"LLAMA_PHASE_KV_ROWS": "1500"}, **sizes)
    device = servers.device(model, unified, **sizes)
    prompts = [prompt(model, n, seed=n) for n in (1500, 30, 700, 9)]
    for workers in (4, 1):
        with ThreadPoolExecutor(workers) as pool:
            answers = list(pool.map(lambda tokens: host.complete(tokens, n=16), prompts))
        for tokens, answer in zip(prompts, answers, strict=True):
            assert_same_but_for_ties(answer.tokens, device.complete(tokens, n=16))
    assert rows_found(host)[1] > 0


@pytest.mark.parametrize("n_draft", [0, 1])
@pytest.mark.parametrize("unified", ["-kvu", "-no-kvu"])
def test_kept_rows_of_some_of_the_slots(servers: KvFleet, prompt, unified: str, n_draft: int) -> None:
    """Two and three of four, at the same split, so strictly equal; with drafts, whose K/V is in host memory, too."""
    model, sizes = "qwen4exp", {"ctx": 4 * 2048, "parallel": 4}
    flags = (unified, *(mtp(n_draft) if n_draft else ()))
    host = servers.host(model, *flags, env={"LLAMA_PHASE_KV_ROWS": "1500"}, **sizes)
    device = servers.device(model, *flags, **sizes)
    prompts = [prompt(model, n, seed=n) for n in (30, 1200, 700)]
    for n in SOME_OF_FOUR:
        of_host, of_device = (server.complete_together(prompts[:n], 24) for server in (host, device))
        assert of_host == of_device and drafts_of(of_host) == drafts_of(of_device)
        assert all(accepted for _, accepted in drafts_of(of_host)) == bool(n_draft)
    assert rows_found(host)[1] > 0


@pytest.mark.parametrize(("rows", "n_draft"), [("300", 0), ("8192", 0), ("300", 3), ("8192", 3)])
def test_kept_rows_of_a_state_that_is_replaced(servers: KvFleet, prompt, tmp_path, rows: str, n_draft: int) -> None:
    """Saved, another conversation in its place, restored: of neither is anything kept where the other's rows are. With
    drafts, whose own K/V is not in the file, the text is the one of K/V on the device that was never saved."""
    model = "qwen4exp-no-ple-exact" if n_draft else "qwen4exp"
    context = prompt(model, 900)
    question = [*context, *prompt(model, 30, seed=3)]
    drafts = mtp(n_draft) if n_draft else ()
    args = (*server_args(DECODE_UBATCH, ctx=4096), *drafts, "--slot-save-path", str(tmp_path))
    server = servers.fresh(model, *args, env=HOST | {"LLAMA_PHASE_KV_ROWS": rows})
    try:
        server.complete(context, n=1)
        assert server.http.post("/slots/0?action=save", json={"filename": "context"}).status_code == 200
        undisturbed = server.complete(question, n=40, cache=True)
        server.complete(prompt(model, 1200, seed=2), n=40)
        assert server.http.post("/slots/0?action=restore", json={"filename": "context"}).status_code == 200
        restored = server.complete(question, n=40, cache=True)
        forked = server.complete([*context[:700], *question[-20:]], n=40, cache=True)
    finally:
        server.stop()
    assert restored.n_cached == undisturbed.n_cached > 0
    if not n_draft:
        assert restored == undisturbed
        return
    assert restored.timings["draft_n"] > 0
    device = servers.device(model)
    assert_same_but_for_ties(restored.tokens, device.complete(question, n=40))
    assert_same_but_for_ties(forked.tokens, device.complete([*context[:700], *question[-20:]], n=40))
