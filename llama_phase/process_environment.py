"""The engine's variables in this process, for as long as a block lasts: the one place that edits our own environment.

The engine reads them when a context is created, with C's getenv.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llama_phase.env import PREFIX, engine_variables, registry
from llama_phase.generation import check_keywords

if TYPE_CHECKING:
    from llama_phase.settings import Settings

_one_at_a_time = threading.RLock()  # the environment belongs to the process; blocks of one thread may nest


@contextlib.contextmanager
def environment(settings: Settings | None = None, /, **keywords: Any) -> Iterator[dict[str, str]]:
    """Set what the engine reads, and put back exactly what was there, also when an exception passes.

    Either `settings`, with what is set already for variables that are no settings, or keywords named as its fields
    (`prefill_mode="transaction", expert_slots=128`), and then nothing else. Gives the variables. Raises TypeError for
    an unknown keyword, UsageError for a bad value. Another thread waits for the block to end.
    """
    if settings is not None and keywords:
        raise TypeError("either settings or keywords, not both")
    if settings is not None:
        wanted = engine_variables(settings, os.environ)
    else:
        wanted = {PREFIX + name.upper(): str(value) for name, value in _checked(keywords).items() if value is not None}
        for name, value in wanted.items():
            registry()[name].check(value)
    with _one_at_a_time:
        before = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
        try:
            _replace(wanted)
            yield wanted
        finally:
            _replace(before)


def _checked(keywords: dict[str, Any]) -> dict[str, Any]:
    check_keywords(keywords, [v.field for v in registry().values() if v.scope == "engine"])
    return keywords


def _replace(variables: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX) and name not in variables]:
        del os.environ[name]
    os.environ.update(variables)
