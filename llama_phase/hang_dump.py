"""What a hanging server was doing, written down before it is stopped: threads and what they wait for, slots, phase."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama_phase.observer import Observer
    from llama_phase.stall_watch import Vitals

KEEP = 5


def write_dump(folder: Path, pid: int, vitals: Vitals, observer: Observer) -> Path | None:
    """Write `hang-<time>.json` into `folder`; None when it cannot be written. KEEP files stay: this one and the newest
    others by name, which holds the time of a clock that may be set back."""
    facts = {
        "pid": pid,
        "at_s": time.time(),
        "vitals": vitals._asdict(),
        "beat": asdict(observer.beat),
        "phase": observer.phase,
        "threads": _threads(pid),
    }
    path = folder / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{pid}.json"
    try:
        path.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        path.chmod(0o600)
        for old in sorted(other for other in folder.glob("hang-*.json") if other != path)[: -(KEEP - 1)]:
            old.unlink(missing_ok=True)
    except OSError:
        return None
    return path


def _threads(pid: int) -> list[dict[str, str]]:
    """Name, state and kernel wait of each thread, as far as the system shows them."""
    threads = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        thread = {"id": task.name}
        for name in ("comm", "wchan", "syscall", "stat"):
            try:
                thread[name] = (task / name).read_text(errors="replace").strip()
            except OSError:
                thread[name] = ""
        fields = thread.pop("stat").rpartition(")")[2].split()
        if len(fields) > 12:
            thread["state"], thread["cpu_ticks"] = fields[0], str(int(fields[11]) + int(fields[12]))
        threads.append(thread)
    return threads
