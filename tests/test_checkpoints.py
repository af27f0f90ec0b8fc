"""A prompt in the prefill phase makes the context checkpoints that stock makes at that micro-batch, and no others.

The server cuts a prompt 4 tokens before its end, and a micro-batch before that or as much as a batch holds, so
positions say which micro-batch it expected. A prompt too short for the phase is cut by the decode phase's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from engine_server import DECODE_UBATCH, PHASE_BIN, PREFILL_UBATCH, STOCK_BIN, phase_environment, server_args
from expert_servers import ExpertFleet

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MADE = re.compile(r"task (\d+) \| created context checkpoint (.+)")  # "2 of 32 (pos_min = 3, ..., size = 0.41 MiB)"
TRACE = ("-lv", "4")  # the level of those lines
AROUND_BORDERS = [k * PREFILL_UBATCH + r for k in (1, 2) for r in (1, 4, 5, 8)]
OF_TWO_BATCHES = 5 * PREFILL_UBATCH + 5  # at the larger one below
TURNS = [600, 1112, 1625]  # of a conversation; a recurrent model goes back 4 tokens: 516 and 517 new ones


class Seen(NamedTuple):
    made: list[list[str]]  # by each prompt
    n_cached: list[int]  # of each prompt
    n_entered: int


@pytest.fixture
def run(servers: ExpertFleet, prompt) -> Callable[..., Seen]:
    """`run(model, binary, ubatch, batch, env)`. The server is ended before its log is read, which is complete then."""

    def run_prompts(model: str, binary: Path, ubatch: int, batch: int, env: Mapping[str, str]) -> Seen:
        server = servers.fresh(model, *server_args(ubatch, batch=batch), *TRACE, binary=binary, env=env)
        try:
            answers = [server.complete(prompt(model, n, seed=n), n=1) for n in (*AROUND_BORDERS, OF_TWO_BATCHES)]
            # of an answer of two tokens the first is in the cache, and the next turn goes on with another
            answers += [server.complete(prompt(model, n), n=2, cache=i > 0) for i, n in enumerate(TURNS)]
            n_entered = server.counters()["entered"] if env else 0
        finally:
            server.stop()
        of_task: dict[str, list[str]] = {}
        for task, made in MADE.findall(server.log_text()):
            of_task.setdefault(task, []).append(made)
        return Seen(list(of_task.values()), [answer.n_cached for answer in answers], n_entered)

    return run_prompts


@pytest.mark.parametrize(
    ("model", "batch", "expert_batch"),
    [
        ("qwen4exp", 4 * PREFILL_UBATCH, "8"),
        ("qwen35moe", PREFILL_UBATCH, "1"),
        ("biased", PREFILL_UBATCH, "1"),
    ],
)
def test_same_checkpoints(run, model: str, batch: int, expert_batch: str) -> None:
    """Recurrent models, and one with windows; left behind the prompt (1), or before its last tokens (8)."""
    env = phase_environment(EXPERT_BATCH=expert_batch)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(run, model, STOCK_BIN, PREFILL_UBATCH, batch, {})
        phase, stock = run(model, PHASE_BIN, DECODE_UBATCH, batch, env), running.result()
    prompts = [*AROUND_BORDERS, OF_TWO_BATCHES, *TURNS]
    assert phase.n_entered == len(prompts) == len(stock.made)
    assert phase.n_cached == stock.n_cached and all(phase.n_cached[1 - len(TURNS) :])
    for n, made in zip(AROUND_BORDERS, stock.made, strict=False):
        cut = n - min(batch, PREFILL_UBATCH + 4)
        assert cut <= 0 or f"n_tokens = {cut}," in made[0], "they tell the micro-batch"
    assert dict(zip(prompts, phase.made, strict=True)) == dict(zip(prompts, stock.made, strict=True))
