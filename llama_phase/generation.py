"""What a generation is asked for and what it gives, the same for an engine in this process and for a server."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from llama_phase.env import nearest

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Progress:
    """How far a prompt is: tokens in all, of those taken from the cache, and processed (cached ones included)."""

    total: int
    cache: int
    processed: int
    time_ms: float

    @classmethod
    def of(cls, answer: dict[str, Any] | None) -> Progress | None:
        """From a server's `prompt_progress`."""
        return None if answer is None else cls(**{f.name: answer.get(f.name, 0) for f in fields(cls)})


@dataclass(frozen=True)
class Completion:
    """An answer. `stop_type`: limit, eos, word, or cancelled. `timings` in milliseconds and tokens per second."""

    text: str
    tokens: list[int]
    stop_type: str
    timings: dict[str, float]
    probabilities: list[dict[str, Any]] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer. `timings` is empty in all but the last, which has `last` set.

    `progress` is set in the pieces that report the prompt; their text is empty.
    """

    text: str
    tokens: list[int]
    last: bool
    timings: dict[str, float]
    raw: dict[str, Any] = field(default_factory=dict, repr=False)
    progress: Progress | None = None
    stop_type: str = ""


@dataclass(frozen=True)
class Request:
    """Keywords of `generate` and `stream`. Greedy unless `temperature` is above 0; -1 as `n_predict`: until the end."""

    n_predict: int = 128
    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_prompt: bool = True
    progress: bool = False

    @classmethod
    def of(cls, n_predict: int, keywords: dict[str, Any]) -> Request:
        """Raises TypeError for an unknown keyword, with the nearest name, and for a value of the wrong type."""
        check_keywords(keywords, [f.name for f in fields(cls)])
        stop = keywords.get("stop", ())
        given = keywords | {"n_predict": n_predict, "stop": (stop,) if isinstance(stop, str) else tuple(stop)}
        return cls(**{name: _typed(name, value) for name, value in given.items()})

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """As llama-server's /completion wants it."""
        body: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "progress"}
        body |= {"prompt": prompt if isinstance(prompt, str) else list(prompt), "stop": list(self.stop)}
        body |= {"return_tokens": True, "return_progress": self.progress}
        return {name: value for name, value in body.items() if value is not None}


_WHOLE = ("n_predict", "top_k", "seed")
_REAL = ("temperature", "top_p", "min_p")


def _typed(name: str, value: Any) -> Any:
    """A value of Request: numbers of other libraries are made Python's, texts are no numbers."""
    try:
        if name in _WHOLE and not (name == "seed" and value is None):
            return operator.index(value)
        if name in _REAL:
            return value.__float__()
    except (TypeError, AttributeError):
        kind = "whole number" if name in _WHOLE else "number"
        raise TypeError(f"{name} is no {kind}: {value!r}") from None
    if name == "stop" and not all(isinstance(word, str) for word in value):
        raise TypeError(f"stop is no text and no list of texts: {value!r}")
    return value


def check_keywords(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for the first name that is not known, with the nearest one that is."""
    known = list(known)
    for name in given:
        if name not in known:
            near = nearest(name, known)
            raise TypeError(f"there is no keyword {name!r}; the nearest is {near!r}")


def collect(chunks: Iterable[Chunk], on_progress: Callable[[Progress], object] | None = None) -> Completion:
    """The whole answer of a stream. `on_progress` is called for each report; what it raises ends the stream."""
    text, tokens, last = "", [], None
    for chunk in chunks:
        if chunk.progress is not None and on_progress is not None:
            on_progress(chunk.progress)
        text += chunk.text
        tokens += chunk.tokens
        last = chunk
    assert last is not None
    return Completion(text, tokens, last.stop_type, last.timings, raw=last.raw)
