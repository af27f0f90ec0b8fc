"""GET /phase, GET /metrics, /props, and the environment of the engine's programs."""

from __future__ import annotations

import re
import subprocess

import pytest
from engine_server import (
    DECODE_UBATCH,
    MIN_TOKENS,
    PHASE_BIN,
    PREFILL_UBATCH,
    Fleet,
    clean_environment,
    phase_environment,
    server_args,
    steps_of,
)

pytestmark = pytest.mark.engine

EXIT_CONFIG = 78
COUNTERS = ("entered", "left", "rolled_back", "failed", "prompts", "short", "blocked", "aborted")
SAMPLE = re.compile(r'^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? ([0-9.e+-]+|\+Inf|NaN)$')


def parse_prometheus(text: str) -> dict[str, float]:
    """Samples by name and labels. Each must belong to a family that was declared just before, with help and type."""
    samples: dict[str, float] = {}
    declared: dict[str, str] = {}
    family = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split()[2]
            assert family not in declared, f"declared twice: {family}"
            declared[family] = ""
        elif line.startswith("# TYPE "):
            assert line.split()[2] == family and line.split()[3] in ("counter", "gauge", "histogram")
            declared[family] = line.split()[3]
        elif line:
            match = SAMPLE.match(line)
            assert match, f"not a sample: {line!r}"
            name, labels, _, value = match.groups()
            suffixes = ("_bucket", "_sum", "_count") if declared[family] == "histogram" else ("",)
            assert name in [family + suffix for suffix in suffixes], f"{name} is not of {family}"
            samples[name + (labels or "")] = float(value)
    return samples


def test_phase_json(one_server, prompt) -> None:
    """Its shape, and that counters move as they say."""
    model = "qwen3moe"
    server = one_server(model)
    state = server.phase()
    assert state["mode"] == "transaction" and state["phase"] == "decode"
    assert state["contexts"] == 1 and state["min_tokens"] == MIN_TOKENS
    assert state["ubatch"] == {"now": DECODE_UBATCH, "decode": DECODE_UBATCH, "prefill": PREFILL_UBATCH}
    assert state["counters"] == dict.fromkeys(COUNTERS, 0)
    assert "last_transaction" not in state and "failure" not in state

    expected = dict.fromkeys(COUNTERS, 0)
    switch, short = {"prompts": 1, "entered": 1, "left": 1}, {"short": 1}
    for n, moved in ((40, short), (MIN_TOKENS, switch), (MIN_TOKENS - 1, short)):
        server.complete(prompt(model, n, seed=n), n=2)
        expected = {name: value + moved.get(name, 0) for name, value in expected.items()}
        assert server.counters() == expected, f"after a prompt of {n} tokens"

    state = server.phase()
    assert state["events"] == "explicit" and state["since_ms"] >= 0
    last = state["last_transaction"]
    assert (last["direction"], last["outcome"]) == ("leave", "committed")
    names = [step["step"] for step in last["steps"]]
    assert names == [step for step in steps_of("leave") if step != "leave.retry_decode_buffers"]
    assert all(step["ok"] and step["ms"] >= 0 for step in last["steps"])
    assert sum(step["ms"] for step in last["steps"]) <= last["ms"] + 0.01


def test_metrics(one_server, prompt) -> None:
    """They parse beside upstream's own, agree with /phase, and the histogram adds up."""
    model = "qwen3moe"
    server = one_server(model)
    for n in (40, 300, 600):
        server.complete(prompt(model, n, seed=n), n=2)
    text = server.metrics_text()
    samples = parse_prometheus(text)
    assert samples["llamacpp:prompt_tokens_total"] == 940
    for name, value in server.counters().items():
        assert samples[f"llama_phase_{name}_total"] == value
    assert samples["llama_phase_prefill"] == samples["llama_phase_unusable"] == 0

    memory = server.phase()["memory"]
    for phase in ("decode", "prefill"):
        held = sum(device["compute_buffer_bytes"] for device in memory[phase])
        assert samples[f'llama_phase_compute_buffer_bytes{{phase="{phase}"}}'] == held > 0

    for direction in ("enter", "leave"):
        label = f'direction="{direction}"'
        buckets = [v for k, v in samples.items() if k.startswith(f"llama_phase_swap_seconds_bucket{{{label}")]
        assert buckets == sorted(buckets) and buckets[-1] == 2
        assert samples[f"llama_phase_swap_seconds_count{{{label}}}"] == 2
        assert samples[f"llama_phase_swap_seconds_sum{{{label}}}"] > 0


def test_bypass_keeps_the_books_and_does_not_switch(fleet: Fleet, prompt) -> None:
    """Same split: stock at the decode micro-batch; memory of both phases is the same."""
    model = "qwen3moe"
    server = fleet.phase(model, PREFILL_MODE="bypass")
    tokens = prompt(model, 1000)
    before = server.counters()
    assert server.complete(tokens) == fleet.stock(model, ubatch=DECODE_UBATCH).complete(tokens)
    state = server.phase()
    assert state["mode"] == "bypass"
    assert state["counters"]["entered"] == state["counters"]["left"] == before["entered"] + 1
    assert state["memory"]["prefill"] == state["memory"]["decode"]


def test_the_key_protects_phase(fleet: Fleet) -> None:
    """With --api-key: /phase and /metrics refuse without it, answer with it, and the key is in no log."""
    key = "correct-horse"
    server = fleet.phase("qwen3moe", "--api-key", key)
    for route in ("/phase", "/metrics"):
        assert server.http.get(route).status_code == 401
        assert server.http.get(route, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert server.http.get("/health").status_code == 200
    assert key not in server.log_text()


def test_props_show_the_engine_id(fleet: Fleet) -> None:
    """Patches and engine are part of it; stock's shows neither."""
    servers = fleet.phase("qwen3moe"), fleet.stock("qwen3moe")
    ours, stock = (server.http.get("/props").json()["build_info"] for server in servers)
    assert re.search(r"-p[0-9a-f]{8}\+?-e[0-9a-f]{8}", ours), ours
    assert not re.search(r"-p[0-9a-f]{8}", stock), stock


def run(program: str, *args: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [PHASE_BIN / program, *args],
        env=clean_environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


WRONG = [
    ({"LLAMA_PHASE_PREFIL_MODE": "transaction"}, ("LLAMA_PHASE_PREFIL_MODE", "nearest: LLAMA_PHASE_PREFILL_MODE")),
    ({"LLAMA_PHASE_EXPERTS_BATCH": "8"}, ("LLAMA_PHASE_EXPERTS_BATCH", "nearest: LLAMA_PHASE_EXPERT_BATCH")),
    ({"LLAMA_PHASE_PREFILL_MODE": "on"}, ("LLAMA_PHASE_PREFILL_MODE=on", "off, transaction, bypass")),
    ({"LLAMA_PHASE_PREFILL_UBATCH": "2k"}, ("LLAMA_PHASE_PREFILL_UBATCH=2k", "1 to 65536")),
    ({"LLAMA_PHASE_PREFILL_UBATCH": "0"}, ("LLAMA_PHASE_PREFILL_UBATCH=0", "1 to 65536")),
    ({"LLAMA_PHASE_PREFILL_UBATCH": "largest"}, ("LLAMA_PHASE_PREFILL_UBATCH=largest", "1 to 65536")),
    ({"LLAMA_PHASE_PREFILL_MIN_TOKENS": "-1"}, ("LLAMA_PHASE_PREFILL_MIN_TOKENS=-1", "auto or 1 to")),
    ({"LLAMA_PHASE_LOG": "loud"}, ("LLAMA_PHASE_LOG=loud", "quiet, info, debug")),
    ({"LLAMA_PHASE_FAULT": "enter.quiece"}, ("LLAMA_PHASE_FAULT", "enter.quiece", "nearest: enter.quiesce")),
    ({"LLAMA_PHASE_FAULT": "enter.quiesce:0"}, ("LLAMA_PHASE_FAULT", "'0'")),
]


@pytest.mark.parametrize(("env", "words"), WRONG, ids=["=".join(*env.items()) for env, _ in WRONG])
@pytest.mark.parametrize("program", ["llama-server", "llama-bench"])
def test_a_wrong_variable_ends_the_program_before_it_loads(
    engine, program: str, env: dict[str, str], words: tuple[str, ...]
) -> None:
    """Exit code 78; the message names the variable and what is accepted. The model need not exist: none is loaded."""
    result = run(program, "-m", "no-such-model.gguf", **env)
    assert result.returncode == EXIT_CONFIG, result.stderr
    assert all(word in result.stderr for word in ("llama-phase: ", *words)), result.stderr
    assert "no-such-model" not in result.stderr + result.stdout


def test_an_empty_variable_is_unset(fleet: Fleet) -> None:
    """As a shell's `VARIABLE=` leaves it."""
    empty = {"LLAMA_PHASE_PREFILL_MODE": "", "LLAMA_PHASE_PREFILL_UBATCH": "", "LLAMA_PHASE_FAULT": ""}
    server = fleet.fresh("qwen3moe", *server_args(DECODE_UBATCH), env=empty)
    try:
        assert server.phase() == {"mode": "off", "phase": "decode"}
    finally:
        server.stop()


def test_a_logical_batch_that_is_too_small_is_said(fleet: Fleet, prompt) -> None:
    """Same split: -b 400 limits the prefill micro-batch of 512 to 400, with a line that says what to change."""
    model = "qwen3moe"
    args = server_args(DECODE_UBATCH, batch=400)
    server = fleet.fresh(model, *args, "-v", env=phase_environment())
    try:
        assert server.phase()["ubatch"]["prefill"] == 400
        assert "start with -b 512" in server.log_text()
        tokens = prompt(model, 1000)
        assert server.complete(tokens) == fleet.stock(model, ubatch=400, batch=400).complete(tokens)
    finally:
        server.stop()
