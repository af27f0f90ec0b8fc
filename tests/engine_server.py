"""Real llama-server processes for the tests: patched with phases, patched with nothing set, and unpatched."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
PHASE_BIN = Path(os.environ.get("TEST_PHASE_BIN", ROOT / "build/cpu/bin"))
STOCK_BIN = Path(os.environ.get("TEST_STOCK_BIN", ROOT / "build/stock/cpu/bin"))

DECODE_UBATCH = 126  # no multiple of a kernel tile, so that a wrong split shows in the logprobs
PREFILL_UBATCH = 512
MIN_TOKENS = max(5 * DECODE_UBATCH // 4, 240)  # PREFILL_MIN_TOKENS=auto

NO_CUTS = ("--ctx-checkpoints", "0")  # a server cuts the prompts of some models for checkpoints

START_S = 60.0
ANSWER_S = 120.0
STOP_S = 20.0


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without LLAMA_* of whoever runs the tests, and with `extra`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_")}
    return kept | dict(extra or {})


def phase_environment(prefill_ubatch: int = PREFILL_UBATCH, **more: str) -> dict[str, str]:
    """Transaction mode; `more` holds names without the prefix, as in `FAULT="enter.quiesce"`."""
    return {
        "LLAMA_PHASE_PREFILL_MODE": "transaction",
        "LLAMA_PHASE_PREFILL_UBATCH": str(prefill_ubatch),
        **{f"LLAMA_PHASE_{name}": value for name, value in more.items()},
    }


def mtp(n_draft: int) -> tuple[str, ...]:
    """Flags of drafts by the model's MTP block, at most so many tokens long."""
    return ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(n_draft))


def steps_of(transaction: str) -> list[str]:
    """Names of the steps of `enter`, `leave` or `undo`, in order, as engine/phase-steps.h has them."""
    header = (ROOT / "engine/phase-steps.h").read_text()
    return re.findall(rf'^#define \w+\s+"({transaction}\.\w+)"', header, re.MULTILINE)


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """The first true value of `condition`; AssertionError naming `what` when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what}")


@dataclass(frozen=True)
class Answer:
    """What has to be the same, bit for bit: tokens, and the ids and logprobs of the likeliest few at each position."""

    tokens: list[int]
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict, compare=False)
    # asks the same server, or one of its kind, for so many tokens that follow the prompt and these tokens
    after: Callable[[Sequence[int], int], Answer] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, reply: Mapping[str, Any], after: Callable[[Sequence[int], int], Answer] | None = None) -> Answer:
        positions = reply.get("completion_probabilities", [])
        tops = [[(top["id"], top["logprob"]) for top in position["top_logprobs"]] for position in positions]
        return cls(reply["tokens"], tops, reply["timings"], after)

    @property
    def n_cached(self) -> int:
        """Prompt tokens taken from the cache."""
        return int(self.timings["cache_n"])

    @property
    def n_new(self) -> int:
        """Prompt tokens computed."""
        return int(self.timings["prompt_n"])


def assert_same_but_for_ties(tokens: Sequence[int], stock: Answer, tie: float = 0.01) -> list[float]:
    """The same tokens but where stock's likeliest is less than `tie` (in logprob) above the other one. For several
    slots on all-F32 models: a sequence's logits differ by up to 1e-3 between batch shapes in stock too, so a near tie
    may fall either way. Behind a tie stock is asked again, from the prompt and the other's tokens so far; that leaves
    the answer's own server with another prompt in its slot. Returns the ties, in order."""
    ties: list[float] = []
    assert len(tokens) == len(stock.tokens)
    reference, begin = stock, 0
    for position, one in enumerate(tokens):
        other = reference.tokens[position - begin]
        if one == other:
            continue
        top = dict(reference.logprobs[position - begin])
        gap = top[other] - top.get(one, -math.inf)
        assert gap < tie, f"token {position} is {one}, stock's {other}, by {gap:.4f} the likelier"
        ties.append(gap)
        begin = position + 1
        if begin == len(tokens):
            break
        assert stock.after is not None, "an answer that cannot be asked for again"
        reference = stock.after(tokens[:begin], len(tokens) - begin)
        assert len(reference.tokens) == len(tokens) - begin
    return ties


class EngineServer:
    """One process. Always greedy; `complete` compares, `stream` cancels, `post` gives the bare response.

    One thread each: two servers then answer side by side on two cores, and no barrier spins on a busy machine.
    """

    def __init__(
        self, binary: Path, model: Path, args: Sequence[str] = (), env: Mapping[str, str] | None = None, *, log: Path
    ):
        self.log = log
        self.living: Callable[[], EngineServer] = lambda: self  # a fleet that has stopped it gives another of its kind
        self.port = _free_port()
        fixed = ["-m", model, "-t", 1, "-tb", 1, "-ngl", 0, "--no-warmup", "--no-ui", "--metrics"]
        fixed += ["--host", "127.0.0.1", "--port", self.port]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [str(part) for part in (binary, *fixed, *args)],
                env=clean_environment(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        # the server closes an idle connection after 5 s; one that is taken again must be younger
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=ANSWER_S,
            trust_env=False,
            limits=httpx.Limits(keepalive_expiry=2),
        )
        self.watched = psutil.Process(self.process.pid)
        try:
            wait_until(self._ready, f"{binary} ready, log {log}", START_S)
        except BaseException:
            self.stop()
            raise

    def _ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"server ended with {self.process.returncode}:\n{self.log_text()[-3000:]}")
        try:
            return self.http.get("/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> int:
        """Ends it, kindly at first; returns the exit code."""
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(STOP_S)

    def wait_exit(self, timeout_s: float = STOP_S) -> int:
        """The exit code of a process that has to end by itself."""
        return self.process.wait(timeout_s)

    @staticmethod
    def request(
        prompt: Sequence[int] | str, n: int = 24, *, cache: bool = False, n_probs: int = 3, **extra: Any
    ) -> dict[str, Any]:
        """Body of /completion. `ignore_eos` so that every answer has `n` tokens."""
        body = {"prompt": prompt, "n_predict": n, "temperature": 0.0, "cache_prompt": cache, "return_tokens": True}
        return body | {"n_probs": n_probs, "ignore_eos": True} | extra

    def post(self, prompt: Sequence[int] | str, n: int = 24, **extra: Any) -> httpx.Response:
        return self.http.post("/completion", json=self.request(prompt, n, **extra))

    def _reply(self, prompt: Any, n: int, **extra: Any) -> Any:
        response = self.post(prompt, n, **extra)
        assert response.status_code == 200, f"{response.status_code}: {response.text}\n{self.log_text()[-3000:]}"
        return response.json()

    def complete(self, prompt: Sequence[int] | str, n: int = 24, **extra: Any) -> Answer:
        def after(tokens: Sequence[int], n_more: int) -> Answer:
            ids = self.tokenize(prompt) if isinstance(prompt, str) else prompt
            return self.living().complete([*ids, *tokens], n_more, **extra | {"cache": False})

        return Answer.of(self._reply(prompt, n, **extra), after)

    def complete_all(self, prompts: Sequence[Sequence[int]], n: int = 24, **extra: Any) -> list[Answer]:
        """Sent at once, one connection each."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, n, **extra), prompts))

    def complete_together(self, prompts: Sequence[Sequence[int]], n: int = 24, **extra: Any) -> list[Answer]:
        """One request: the prompts begin in the same step, each in a slot, so that batches are the same every time."""
        reply = self._reply([list(prompt) for prompt in prompts], n, **extra)
        replies = reply if len(prompts) > 1 else [reply]
        return [Answer.of(reply) for reply in sorted(replies, key=lambda reply: reply["index"])]

    @contextmanager
    def stream(self, prompt: Sequence[int], n: int = 24, **extra: Any) -> Iterator[Iterator[dict]]:
        """Pieces of a streamed answer as they come; leaving the block early closes the connection."""
        body = self.request(prompt, n, **extra) | {"stream": True}
        once = {"Connection": "close"}  # the server closes a connection that has streamed, without saying so
        with self.http.stream("POST", "/completion", json=body, headers=once) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: {"))
            yield (json.loads(line.removeprefix("data: ")) for line in lines)

    def tokenize(self, text: str) -> list[int]:
        return self.http.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]

    def phase(self) -> dict[str, Any]:
        return self.http.get("/phase").json()

    def counters(self) -> dict[str, int]:
        return self.phase()["counters"]

    def metrics_text(self) -> str:
        return self.http.get("/metrics").text

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def rss_bytes(self) -> int:
        return self.watched.memory_info().rss

    def n_descriptors(self) -> int:
        return self.watched.num_fds()


def both(
    one: EngineServer, other: EngineServer, prompt: Sequence[int], n: int = 24, **extra: Any
) -> tuple[Answer, Answer]:
    """The answers of two servers, computed at the same time."""
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(server.complete, prompt, n, **extra) for server in (one, other)]
        return futures[0].result(), futures[1].result()


SOME_OF_FOUR = (2, 3, 2)  # prompts at once, of a server with four slots


def drafts_of(answers: Sequence[Answer]) -> list[tuple[float, float]]:
    """Drafted and accepted tokens of each."""
    return [(answer.timings.get("draft_n", 0), answer.timings.get("draft_n_accepted", 0)) for answer in answers]


def server_args(ubatch: int, *, batch: int = PREFILL_UBATCH, ctx: int = 4096, parallel: int = 1) -> tuple[str, ...]:
    """Sizes; no prompt cache in host RAM, so that what is reused is what is in the slot."""
    sizes = {"-ub": ubatch, "-b": batch, "-c": ctx, "-np": parallel, "--cache-ram": 0}
    return tuple(str(part) for pair in sizes.items() for part in pair)


class Fleet:
    """Keeps servers running between tests, the `limit` used last, so that a test pays a start only for a new kind."""

    def __init__(self, models: Callable[[str], Path], logs: Path, limit: int = 6):
        self.models = models
        self.logs = logs
        self.limit = limit
        self.running: dict[tuple, EngineServer] = {}  # oldest use first
        self.n_started = 0

    def phase(self, model: str, *args: str, sizes: Mapping[str, int] | None = None, **env: str) -> EngineServer:
        """Patched, with phases: -ub 126, prefill micro-batch 512."""
        sizes = {"ubatch": DECODE_UBATCH} | dict(sizes or {})
        return self._get(PHASE_BIN, model, (*server_args(**sizes), *args), phase_environment(**env))

    def off(self, model: str, *args: str, ubatch: int = DECODE_UBATCH, **sizes: int) -> EngineServer:
        """Patched, no variable set."""
        return self._get(PHASE_BIN, model, (*server_args(ubatch, **sizes), *args), {})

    def stock(self, model: str, *args: str, ubatch: int = PREFILL_UBATCH, **sizes: int) -> EngineServer:
        """Unpatched."""
        return self._get(STOCK_BIN, model, (*server_args(ubatch, **sizes), *args), {})

    def fresh(self, model: str, *args: str, binary: Path = PHASE_BIN, env: Mapping[str, str]) -> EngineServer:
        """Not shared: for tests that count from zero or end the process. The caller stops it."""
        self.n_started += 1
        log = self.logs / f"server-{self.n_started}.log"
        return EngineServer(binary / "llama-server", self.models(model), args, env, log=log)

    def _get(self, binary: Path, model: str, args: tuple[str, ...], env: Mapping[str, str]) -> EngineServer:
        key = (binary, model, args, tuple(sorted(env.items())))
        server = self.running.pop(key, None)
        if server is None or server.process.poll() is not None:
            while len(self.running) >= self.limit:
                self.running.pop(next(iter(self.running))).stop()
            server = self.fresh(model, *args, binary=binary, env=env)
            server.living = lambda: self._get(binary, model, args, env)
        self.running[key] = server
        return server

    def close(self) -> None:
        while self.running:
            self.running.popitem()[1].stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
