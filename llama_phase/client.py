"""A small synchronous client for a running llama-server, with our routes. All failures are typed."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import httpx

from llama_phase.async_bridge import iterate_in_thread
from llama_phase.errors import LlamaPhaseError, UsageError
from llama_phase.generation import Chunk as Chunk  # part of this module's interface
from llama_phase.generation import Completion as Completion
from llama_phase.generation import Progress, Prompt, Request, collect
from llama_phase.phase_facts import PhaseStats


class RequestFailed(LlamaPhaseError):
    """The server could not be reached, or answered a request with an error. `status` is 0 without an answer."""

    exit_code = 11

    def __init__(self, message: str, *, status: int = 0, fix: str = ""):
        super().__init__(message, fix=fix)
        self.status = status


class Client:
    """Talks to the server at `base_url`. Answers are waited for without limit unless a timeout in seconds is given:
    a healthy long prompt must not be cut off. Raises UsageError for a URL or key that is none."""

    def __init__(self, base_url: str, *, api_key: str | None = None, transport: httpx.BaseTransport | None = None):
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # certificates of a loopback server are its owner's own; plain http needs no certificate store loaded
        # the server closes an idle connection after 5 s; one that is taken again must be younger
        try:
            self._http = httpx.Client(
                base_url=base_url,
                headers=headers,
                verify=False,
                trust_env=False,
                timeout=None,
                transport=transport,
                limits=httpx.Limits(keepalive_expiry=2),
            )
        except httpx.InvalidURL:
            raise UsageError(f"{base_url!r} is no URL", fix="give one like http://127.0.0.1:8080") from None
        except UnicodeError:
            raise UsageError("the API key has characters that no header can hold", fix="use plain ASCII") from None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def healthy(self, *, timeout_s: float = 2.0) -> bool:
        """Whether /health says the model is loaded. Never raises for a server that is not there."""
        try:
            return self._http.get("/health", timeout=timeout_s).status_code == 200
        except httpx.HTTPError:
            return False

    def completion(
        self,
        prompt: str | Sequence[int],
        n_predict: int = 128,
        *,
        greedy: bool = True,
        cache_prompt: bool = True,
        n_probs: int = 0,
        id_slot: int = -1,
        timeout_s: float | None = None,
        **extra: Any,
    ) -> Completion:
        """POST /completion. `prompt` is text or token ids; `extra` goes into the request as it is."""
        body = _body(prompt, n_predict, greedy, cache_prompt, n_probs, id_slot, extra)
        answer = self._json("POST", "/completion", body, timeout_s)
        return Completion(
            text=answer.get("content", ""),
            tokens=answer.get("tokens", []),
            stop_type=answer.get("stop_type", ""),
            timings=answer.get("timings", {}),
            probabilities=answer.get("completion_probabilities", []),
            raw=answer,
        )

    def stream(
        self,
        prompt: str | Sequence[int],
        n_predict: int = 128,
        *,
        greedy: bool = True,
        cache_prompt: bool = True,
        n_probs: int = 0,
        id_slot: int = -1,
        timeout_s: float | None = None,
        **extra: Any,
    ) -> Iterator[Chunk]:
        """Like ``completion``, in pieces. Closing the iterator early cancels the request on the server.

        With `return_progress=True` pieces with `progress` come while the prompt is processed.
        """
        body = _body(prompt, n_predict, greedy, cache_prompt, n_probs, id_slot, extra) | {"stream": True}
        try:
            # llama-server closes the connection after a streamed answer without announcing it
            once = {"Connection": "close"}
            with self._http.stream("POST", "/completion", json=body, headers=once, timeout=timeout_s) as response:
                if response.is_error:
                    response.read()
                    raise _failure("/completion", response)
                for line in response.iter_lines():
                    name, _, data = line.partition(":")
                    if name == "error":
                        raise RequestFailed(f"/completion: {_error_text(_parse(data))}", status=500)
                    if name != "data" or data.strip() == "[DONE]":
                        continue
                    piece = _parse(data)
                    if "error" in piece:
                        raise RequestFailed(f"/completion: {_error_text(piece)}", status=500)
                    yield _chunk(piece)
        except httpx.HTTPError as error:
            raise self._unreachable("/completion", error) from None

    def generate(
        self,
        prompt: Prompt,
        n_predict: int = 128,
        *,
        on_progress: Callable[[Progress], object] | None = None,
        **keywords: Any,
    ) -> Completion:
        """As Engine.generate: the fields of generation.Request, greedy by default, TypeError for other keywords."""
        keywords.setdefault("progress", on_progress is not None)
        body = Request.of(n_predict, keywords).body(prompt)
        with contextlib.closing(self.stream(**body)) as chunks:
            return collect(chunks, on_progress)

    def stream_async(self, prompt: Prompt, n_predict: int = 128, **keywords: Any) -> AsyncGenerator[Chunk, None]:
        """As Engine.stream_async. Ending it early cancels the request, at the next piece or report of the server."""
        body = Request.of(n_predict, keywords | {"progress": True}).body(prompt)
        wanted = bool(keywords.get("progress"))
        unwanted = threading.Event()

        def pieces() -> Iterator[Chunk]:
            with contextlib.closing(self.stream(**body)) as chunks:
                for chunk in chunks:
                    if unwanted.is_set():
                        return
                    if wanted or chunk.progress is None:
                        yield chunk

        return iterate_in_thread(pieces, unwanted.set)

    async def generate_async(self, prompt: Prompt, n_predict: int = 128, **keywords: Any) -> Completion:
        """As Engine.generate_async."""
        async with contextlib.aclosing(self.stream_async(prompt, n_predict, **keywords)) as chunks:
            return collect([chunk async for chunk in chunks])

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; `add_special` as /completion does it."""
        return self._json("POST", "/tokenize", {"content": text, "add_special": add_special})["tokens"]

    def props(self, *, timeout_s: float | None = 10.0) -> dict[str, Any]:
        """GET /props; `build_info` holds the engine id."""
        return self._json("GET", "/props", timeout_s=timeout_s)

    def phase(self, *, timeout_s: float | None = 10.0) -> dict[str, Any] | None:
        """GET /phase; None from an engine without it (stock llama.cpp)."""
        try:
            return self._json("GET", "/phase", timeout_s=timeout_s)
        except RequestFailed as error:
            if error.status == 404:
                return None
            raise

    def slots(self, *, timeout_s: float | None = 10.0) -> list[dict[str, Any]]:
        """GET /slots: one object per slot. RequestFailed with status 501 when the server was started without it."""
        return self._json("GET", "/slots", timeout_s=timeout_s).get("value", [])

    def stats(self, *, timeout_s: float | None = 10.0) -> PhaseStats:
        """The counters of `phase`, typed."""
        return PhaseStats.from_report(self.phase(timeout_s=timeout_s))

    def metrics(self, *, timeout_s: float | None = 10.0) -> dict[str, float]:
        """GET /metrics by name, labels included in the name: `llamacpp:prompt_tokens_total`, `x_bucket{le="5"}`."""
        return parse_metrics(self._request("GET", "/metrics", None, timeout_s).text)

    def _json(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        return _parse(self._request(method, path, body, timeout_s).text)

    def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise self._unreachable(path, error) from None
        if response.is_error:
            raise _failure(path, response)
        return response

    def _unreachable(self, path: str, error: Exception) -> RequestFailed:
        return RequestFailed(
            f"no answer from {str(self._http.base_url).rstrip('/')}{path}: {error or type(error).__name__}",
            fix="is the server running? `llama-phase serve` shows its state",
        )


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text to {name with labels: value}; comments and unreadable lines are left out."""
    values = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if not name or line.startswith("#"):
            continue
        try:
            values[name.strip()] = float(value)
        except ValueError:
            continue
    return values


def _body(
    prompt: str | Sequence[int],
    n_predict: int,
    greedy: bool,
    cache_prompt: bool,
    n_probs: int,
    id_slot: int,
    extra: dict[str, Any],
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "n_predict": n_predict,
        "cache_prompt": cache_prompt,
        "n_probs": n_probs,
        "id_slot": id_slot,
        "return_tokens": True,
    }
    if greedy:
        body["temperature"] = 0.0
    return body | extra


def _chunk(piece: dict[str, Any]) -> Chunk:
    progress = Progress.of(piece.get("prompt_progress"))
    return Chunk(
        text=piece.get("content", ""),
        tokens=[] if progress else piece.get("tokens", []),  # the server sends token 0 with a report
        last=bool(piece.get("stop")),
        timings=piece.get("timings", {}),
        raw=piece,
        progress=progress,
        stop_type=piece.get("stop_type", ""),
    )


def _parse(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise RequestFailed(f"the server answered with something that is not JSON: {text[:80]!r}") from None
    return value if isinstance(value, dict) else {"value": value}


def _error_text(answer: dict[str, Any]) -> str:
    error = answer.get("error", answer)
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _failure(path: str, response: httpx.Response) -> RequestFailed:
    try:
        text = _error_text(_parse(response.text))
    except RequestFailed:
        text = response.text[:200]
    fix = "pass the server's API key" if response.status_code == 401 else ""
    return RequestFailed(f"{path}: HTTP {response.status_code}: {text}", status=response.status_code, fix=fix)
