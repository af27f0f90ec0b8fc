"""Iterate a blocking iterator from asyncio: one thread per stream, which is gone when the async iterator is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


async def iterate_in_thread(start: Callable[[], Iterator[T]], cancel: Callable[[], object]) -> AsyncGenerator[T, None]:
    """Items of `start()`, which runs in a thread of its own. An early end (aclose, a cancelled task) calls
    `cancel`, which should make the iterator return soon, and waits for the thread."""
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
    finished = loop.create_future()
    unwanted = threading.Event()

    def tell(kind: str, value: Any = None) -> None:
        loop.call_soon_threadsafe(items.put_nowait, (kind, value))

    def work() -> None:
        try:
            iterator = start()
            try:
                for item in iterator:
                    if unwanted.is_set():
                        break
                    tell("item", item)
            finally:
                close = getattr(iterator, "close", None)
                if close is not None:
                    close()
            tell("end")
        except BaseException as error:
            tell("error", error)
        finally:
            loop.call_soon_threadsafe(lambda: finished.done() or finished.set_result(None))

    threading.Thread(target=work, name="llama-phase stream", daemon=True).start()
    try:
        while True:
            kind, value = await items.get()
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value
    finally:
        unwanted.set()
        if not finished.done():
            cancel()
            await asyncio.wait([finished])
