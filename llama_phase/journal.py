"""The journal of configurations that served: what the supervisor goes back to when a changed one does not.

A folder of small files, `000012-ok.json`, one per record, never changed once written. The highest number is the newest.
A record says that a configuration served (`ok`), or that one which had served does no longer (`bad`). Each holds a
digest of itself: one that a power loss or a full disk cut is as if it had never been written. So the journal is right
after a stop at any byte, and a damaged record costs itself only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_phase.configuration import Configuration
from llama_phase.durable_file import TEMPORARY, Disk, RealDisk, write_durably
from llama_phase.gguf_header import check_model
from llama_phase.upstream_flags import DRAFT_MODEL, flag_value

KEEP = 16  # records, and beyond them
KEEP_GOOD = 4  # configurations
_NAME = re.compile(r"(\d{6,})-(ok|bad)\.json")


@dataclass(frozen=True)
class Record:
    """`number` orders the records and names one for `rollback --to`; `at_s` is seconds since the epoch."""

    number: int
    verdict: str
    configuration: Configuration
    at_s: float
    reason: str = ""


def good_configurations(records: list[Record]) -> list[Record]:
    """Configurations whose last record is `ok`, newest first, each once."""
    latest: dict[str, Record] = {}
    for record in records:
        latest[record.configuration.fingerprint] = record
    good = [record for record in latest.values() if record.verdict == "ok"]
    return sorted(good, key=lambda record: -record.number)


def check_files(configuration: Configuration, folder: Path) -> None:
    """Raise ModelError for a model or draft of a configuration that served once and cannot be loaded now by a process
    whose current folder is `folder`."""
    check_model(Path(str(configuration.settings["model"])))
    draft = flag_value(tuple(map(str, configuration.settings.get("upstream") or ())), DRAFT_MODEL)
    if draft:
        check_model(folder / draft, draft=True)


class Journal:
    """The records in `folder`. One writer at a time: the holder of the supervisor's lock."""

    def __init__(self, folder: Path, *, disk: Disk | None = None, now: Callable[[], float] = time.time):
        self.folder = folder
        self._disk = disk or RealDisk()
        self._now = now

    def records(self) -> list[Record]:
        """All readable records, oldest first. Never raises for damaged ones."""
        try:
            names = sorted(path.name for path in self.folder.iterdir())
        except OSError:
            return []
        found = [_read(self.folder / name, match) for name in names if (match := _NAME.fullmatch(name))]
        return sorted((record for record in found if record), key=lambda record: record.number)

    def good(self) -> list[Record]:
        """What can be gone back to, newest first."""
        return good_configurations(self.records())

    def served(self, configuration: Configuration) -> None:
        """Note that it served. Nothing is written when it is the newest good one already. Raises OSError."""
        records = self.records()
        if not (records and records[-1].verdict == "ok" and records[-1].configuration == configuration):
            self._append("ok", configuration, "")

    def failed(self, configuration: Configuration, reason: str) -> None:
        """Note that a configuration which served before does no longer. Raises OSError."""
        if any(record.configuration.fingerprint == configuration.fingerprint for record in self.good()):
            self._append("bad", configuration, reason)

    def _append(self, verdict: str, configuration: Configuration, reason: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # numbers of damaged records are not used again: they would be overwritten, not appended
        taken = [int(match[1]) for path in self.folder.iterdir() if (match := _NAME.match(path.name))]
        number = max(taken, default=0) + 1
        body = {"verdict": verdict, "at_s": self._now(), "reason": reason, "configuration": configuration.to_dict()}
        text = json.dumps(body, sort_keys=True)
        content = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "record": body}, sort_keys=True)
        write_durably(self.folder / f"{number:06}-{verdict}.json", content.encode() + b"\n", self._disk)
        with contextlib.suppress(OSError):  # it is written, and the next one prunes as well
            self._prune()

    def _prune(self) -> None:
        records = self.records()
        kept = {record.number for record in records[-KEEP:]}
        kept.update(record.number for record in self.good()[:KEEP_GOOD])
        # a `bad` record may go only after every older `ok` of the same configuration: oldest first does that
        for path in sorted(self.folder.iterdir()):
            match = _NAME.fullmatch(path.name)
            if (match and int(match[1]) not in kept) or path.name.endswith(TEMPORARY):
                self._disk.remove(path)


def _read(path: Path, name: re.Match[str]) -> Record | None:
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        body = data["record"]
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        if digest != data["sha256"] or body["verdict"] != name[2]:
            return None
        configuration = Configuration.from_dict(body["configuration"])
        return Record(int(name[1]), body["verdict"], configuration, float(body["at_s"]), str(body["reason"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
