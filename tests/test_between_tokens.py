"""What the host does between two tokens is cut short, and changes neither tokens nor what is answered meanwhile."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_server import DECODE_UBATCH, EngineServer, Fleet, both, phase_environment, server_args, wait_until

pytestmark = pytest.mark.engine

MODEL = "qwen3moe"
FORBIDDEN = [[token, False] for token in range(0, 120, 3)]
TWICE = [[5, 4.0], [900, 2.0], [5, 4.0], [8000, 60.0]]  # ignore_eos adds to them
SAMPLERS: list[dict[str, Any]] = [
    {"ignore_eos": False},
    {"top_k": 10},  # few enough for the short way in a vocabulary of 8192
    {"top_k": 10, "logit_bias": FORBIDDEN},
    {"top_k": 10, "logit_bias": [[7777, 9.0], [13, -3.5], [4000, 8.5]]},
    {"logit_bias": TWICE},
    {"logit_bias": [[token, 0.5] for token in range(200)]},  # many
    {"top_k": 10, "temperature": 1.5, "seed": 7, "logit_bias": FORBIDDEN},
    {"top_k": 10, "temperature": 1.5, "seed": 7, "repeat_penalty": 1.3, "logit_bias": FORBIDDEN},
]


@pytest.mark.parametrize("sampling", SAMPLERS, ids=str)
def test_the_same_tokens_however_they_are_chosen(fleet: Fleet, prompt, sampling: dict[str, Any]) -> None:
    """Same split."""
    of_phase, of_stock = both(
        fleet.phase(MODEL), fleet.stock(MODEL, ubatch=DECODE_UBATCH), prompt(MODEL, 40), **sampling
    )
    assert of_phase == of_stock


def test_a_bias_decides(fleet: Fleet, prompt) -> None:
    """The comparison can fail: what is forbidden would have been chosen."""
    server = fleet.phase(MODEL)
    plain = server.complete(prompt(MODEL, 40), top_k=10)
    without = server.complete(prompt(MODEL, 40), top_k=10, logit_bias=[[plain.tokens[0], False]])
    assert without.tokens[0] == plain.logprobs[0][1][0]


COUNTING = """
#include <dlfcn.h>
#include <cstdio>
#include <cstdlib>
static long calls;
extern "C" float * llama_get_sampled_probs_ith(void * ctx, int i) {
    ++calls;
    return ((float * (*)(void *, int)) dlsym(RTLD_NEXT, "llama_get_sampled_probs_ith"))(ctx, i);
}
__attribute__((destructor)) static void last() {
    if (FILE * f = fopen(getenv("CALLS_FILE"), "w")) {
        fprintf(f, "%ld", calls);
        fclose(f);
    }
}
"""


@pytest.mark.parametrize(
    ("sampling", "long_way"),
    [({}, 0), ({"ignore_eos": False}, 0), ({"logit_bias": FORBIDDEN}, 0), ({"repeat_penalty": 1.3}, 8)],
    ids=["ignore_eos", "plain", "bias", "penalty"],
)
def test_which_way_a_token_is_chosen(
    fleet: Fleet, prompt, tmp_path: Path, sampling: dict[str, Any], long_way: int
) -> None:
    """The long way, with the table of the vocabulary, begins by asking for what a device sampled."""
    library, calls = tmp_path / "count.so", tmp_path / "calls"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=COUNTING, text=True, check=True)
    env = phase_environment() | {"LD_PRELOAD": str(library), "CALLS_FILE": str(calls)}
    server = fleet.fresh(MODEL, *server_args(DECODE_UBATCH), env=env)
    try:
        server.complete(prompt(MODEL, 20), n=8, n_probs=0, **sampling)
    finally:
        server.stop()
    assert int(calls.read_text()) == long_way


def switches(server: EngineServer) -> dict[int, int]:
    """How often each thread went to sleep."""
    out = {}
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        line = next(x for x in (task / "status").read_text().splitlines() if x.startswith("voluntary_ctxt"))
        out[int(task.name)] = int(line.split()[1])
    return out


def test_no_thread_is_woken_for_a_token(fleet: Fleet, prompt) -> None:
    server, n = fleet.phase(MODEL), 400
    server.complete(prompt(MODEL, 20), n=4, n_probs=0)
    before = switches(server)
    server.complete(prompt(MODEL, 20), n=n, n_probs=0)
    after = switches(server)
    slept = {thread: count - before.get(thread, 0) for thread, count in after.items()}
    assert max(slept.values()) < n / 4, slept


def test_the_state_is_told_while_a_prompt_is_computed(fleet: Fleet, prompt) -> None:
    """Several times in one batch, of which the server's own thread sees only the end."""
    server = fleet.fresh("qwen4exp", "-ub", "2048", "-b", "2048", "-c", "4096", "-np", "1", env={})
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.complete, prompt("qwen4exp", 2000), n=1)
            wait_until(lambda: server.http.get("/slots").json()[0]["is_processing"] or asked.done(), "a prompt begins")
            told = 0
            while not asked.done():
                assert server.http.get("/slots").json()[0]["id"] == 0
                assert "prompt_tokens_total" in server.metrics_text()
                told += 1
            assert told > 3
            assert len(asked.result().tokens) == 1
    finally:
        assert server.stop() == 0
