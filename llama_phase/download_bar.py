"""A progress bar for a download: size, speed and ETA on a terminal, a line per tenth elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

Advance = Callable[[int, int], None]  # bytes done, bytes in all (0: unknown)


def download_bar(console: Console) -> Callable[[str], AbstractContextManager[Advance]]:
    """A factory of bars: ``with download_bar(console)("name") as advance: advance(done, total)``."""

    @contextmanager
    def bar(label: str) -> Iterator[Advance]:
        if not console.is_terminal:
            tenth = -1

            def line(done: int, total: int) -> None:
                nonlocal tenth
                if total and done * 10 // total > tenth:
                    tenth = done * 10 // total
                    console.print(f"{label}: {done >> 20} of {total >> 20} MiB", highlight=False, markup=False)

            yield line
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(label, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total or None)

    return bar
