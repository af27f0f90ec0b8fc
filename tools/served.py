"""Servers whose answers are compared on a GPU."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llama_phase.bench import prompt_tokens
from llama_phase.client import Client, RequestFailed
from llama_phase.server import Server
from llama_phase.settings import Settings

COMMON = ("-ngl", "99", "-np", "1", "--no-warmup", "-t", "4")
PREFILL_UBATCH = 1024
PHASE = {
    "prefill_mode": "transaction",
    "ubatch": 128,
    "batch": PREFILL_UBATCH,
    "prefill_ubatch": PREFILL_UBATCH,
    "prefill_min_tokens": 256,
}
STOCK = {"prefill_mode": "off", "ubatch": PREFILL_UBATCH, "batch": PREFILL_UBATCH}
COMPLAINT = re.compile(r"^\S+ E .*|.*(?:failed|could not|does not match|inconsistent).*", re.MULTILINE)


@contextmanager
def logged(model: Path, settings: dict[str, Any], upstream: tuple[str, ...]) -> Iterator[tuple[Client, Path]]:
    """A client of a server with these settings (context 8192 unless they say another), and that server's log. Raises
    what the server's end means when it dies under a request."""
    loaded = Settings.load(model=model, port=0, upstream=(*COMMON, *upstream), **{"ctx": 8192, **settings})
    with Server(loaded) as server, server.client() as client:
        try:
            yield client, Path(server.log_path or "")
        except RequestFailed:
            time.sleep(1)  # until the process has ended
            server.check_alive()
            raise


@contextmanager
def served(model: Path, settings: dict[str, Any], upstream: tuple[str, ...]) -> Iterator[Client]:
    """The client alone."""
    with logged(model, settings, upstream) as (client, _):
        yield client


def split_over(gpus: int) -> tuple[str, ...]:
    """Flags that divide the layers evenly among so many devices."""
    return ("-ts", ",".join("1" * gpus)) if gpus > 1 else ()


def prompt_of(n_tokens: int) -> list[int]:
    """So many random tokens, others for each length."""
    return prompt_tokens(n_tokens, n_tokens, 4000)


def together(client: Client, prompts: Sequence[Sequence[int]], n_predict: int, **asked: Any) -> list[dict[str, Any]]:
    """The server's replies to one request with several prompts, in their order: each takes a slot, and all begin in
    the same step."""
    got = client.completion(prompts, n_predict, **asked).raw["value"]  # type: ignore[arg-type]
    return sorted(got, key=lambda reply: reply["index"])


def complaints(log: str) -> list[str]:
    """Lines of a server's log that say something went wrong."""
    return COMPLAINT.findall(log)
