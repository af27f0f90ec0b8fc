"""Conversations outlive a restart: the slots' state is saved on stop and at intervals, restored when it proves right.

    save     slot -> slotN.new -> its tokens + 1 more, continued greedily by a few -> slotN.state, then slotN.json
    restore  slotN.state -> slot -> the same continuation; the same tokens and nearly the same probabilities: kept

A state is only a cache: a conversation that is dropped costs its prompt once more. So whatever is doubtful is dropped,
and said: another model or engine, a torn file, a state the server does not take, another continuation.

The continuation is of the saved tokens plus one, so that nothing in the slot is taken back, which recurrent models
cannot do; afterwards the slot gets its saved state again. Nothing is saved while a request runs: batches of another
shape give slightly other probabilities.

What llama-server has moved from a slot to its cache in host memory is not in a slot, and not saved: with its default of
one K/V for all slots that is every conversation but the last.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from llama_phase.client import RequestFailed
from llama_phase.errors import LlamaPhaseError
from llama_phase.settings import Settings
from llama_phase.slot_client import Replay, Slot, saved_tokens
from llama_phase.tree import write_atomically

REPLAYED = 4  # tokens
LOGPROB_ERROR = 0.05  # a damaged state is off by more; another batch shape by less


class Slots(Protocol):
    """What is needed of SlotClient."""

    def held(self) -> list[Slot]: ...
    def save(self, slot: int, filename: str) -> None: ...
    def restore(self, slot: int, filename: str) -> None: ...
    def erase(self, slot: int) -> None: ...
    def replay(self, slot: int, tokens: Sequence[int], n: int) -> Replay: ...


@dataclass(frozen=True)
class Saved:
    """What slotN.json says of slotN.state. `identity`: model and engine it belongs to."""

    slot: int
    n_tokens: int
    n_bytes: int
    crc32: int
    expected_tokens: list[int]
    expected_logprobs: list[float]
    identity: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """`slots` were saved or restored; `dropped` holds a sentence for each that was not, and why."""

    slots: tuple[int, ...] = ()
    dropped: tuple[str, ...] = ()


def folder_for(settings: Settings) -> Path:
    """The folder for saved slots, made if need be: llama-server wants it to be there. Raises LlamaPhaseError."""
    folder = settings.conversations_path
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise LlamaPhaseError(
            f"cannot make {folder} for conversations: {error.strerror}", fix="allow it, or do not keep conversations"
        ) from None
    return folder


def identity_of(model: Path, props: Mapping[str, Any]) -> dict[str, Any]:
    """What a saved state depends on: the model's file, and the engine (of GET /props)."""
    about = model.stat()
    return {"model_bytes": about.st_size, "model_mtime_ns": about.st_mtime_ns, "engine": props.get("build_info", "")}


def distrust(saved: Saved, identity: Mapping[str, Any], n_slots: int, n_bytes: int) -> str:
    """Why a saved slot is not even tried; empty when it is. Pure."""
    if saved.identity.get("engine") != identity.get("engine"):
        return "it was saved by another engine"
    if saved.identity != identity:
        return "it was saved with another model"
    if saved.slot >= n_slots:
        return f"the server has only {n_slots} slots now"
    if saved.n_bytes != n_bytes:
        return "its file is not complete"
    return ""


def difference(saved: Saved, replay: Replay) -> str:
    """Why the continuation shows a state not to be the saved one; empty when it is. Pure."""
    if replay.n_cached != saved.n_tokens:
        return f"the server took {replay.n_cached} of its {saved.n_tokens} tokens"
    if replay.tokens != saved.expected_tokens:
        return "it goes on with other tokens than before"
    pairs = zip(replay.logprobs, saved.expected_logprobs, strict=False)
    if any(abs(one - other) > LOGPROB_ERROR for one, other in pairs):
        return "it goes on with other probabilities than before"
    return ""


class _CannotGoOn(ValueError):
    """The server computed the prompt anew instead of going on from a restored state (sliding windows)."""


class Conversations:
    """One server's. Call its methods from one thread at a time; they take as long as the server takes."""

    def __init__(self, folder: Path, slots: Slots, identity: Mapping[str, Any]):
        self._folder, self._slots, self._identity = folder, slots, dict(identity)
        self._kept: dict[int, Slot] = {}  # as they were after saving or restoring
        self._useless = False  # proving it has cost a whole prompt: not tried again

    def save(self) -> Outcome:
        """Save the slots that changed since. Nothing while one is busy, and nothing of a server that is gone."""
        if self._useless:
            return Outcome()
        try:
            slots = self._slots.held()
        except RequestFailed as error:
            self._useless = error.status == 501  # started with --no-slots
            return Outcome(dropped=(f"conversations are not saved: {error}",))
        if any(slot.busy for slot in slots):
            return Outcome()
        changed = [slot.id for slot in slots if slot.n_tokens and slot != self._kept.get(slot.id)]
        written: list[int] = []
        saved: list[int] = []
        dropped: list[str] = []
        try:
            # all before the first continuation: a request makes the server clear the idle slots
            for slot in changed:
                with self._dropping(slot, dropped):
                    self._make_private(self._new(slot))
                    self._slots.save(slot, self._new(slot).name)
                    written.append(slot)
            for slot in written:
                with self._dropping(slot, dropped):
                    self._prove(slot)
                    saved.append(slot)
                if self._useless:
                    break
        finally:
            for slot in changed:
                self._new(slot).unlink(missing_ok=True)
        self._settle(saved)
        return Outcome(tuple(saved), tuple(dropped))

    def restore(self) -> Outcome:
        """Restore what can be trusted, and delete what can't. Before that the slots should hold nothing of value."""
        try:
            n_slots = len(self._slots.held())
        except RequestFailed as error:
            return Outcome(dropped=(f"conversations are not restored: {error}",))
        restored: list[int] = []
        dropped: list[str] = []
        for path in sorted(self._folder.glob("slot*.json")):
            number = path.stem.removeprefix("slot")
            if not number.isdecimal():
                continue
            slot = int(number)
            with self._dropping(slot, dropped):
                self._restore(path, slot, n_slots)
                restored.append(slot)
            if slot not in restored:
                self._delete(slot)
        self._settle(restored)
        return Outcome(tuple(restored), tuple(dropped))

    def _prove(self, slot: int) -> None:
        """Continue the state just written, and make it the saved one. Raises what _dropping expects."""
        new = self._new(slot)
        tokens = saved_tokens(new)
        if not tokens:
            raise ValueError("it holds images or audio" if tokens is None else "it is empty")
        self._slots.restore(slot, new.name)
        replay = self._replay(slot, tokens)
        if replay.n_cached != len(tokens):
            raise _CannotGoOn("this model cannot go on from a saved state")
        n_bytes, crc32 = checksum(new)
        about = Saved(slot, len(tokens), n_bytes, crc32, replay.tokens, replay.logprobs, self._identity)
        os.replace(new, self._state(slot))
        write_atomically(self._about(slot), json.dumps(asdict(about)).encode(), mode=0o600)

    def _restore(self, path: Path, slot: int, n_slots: int) -> None:
        try:
            saved = Saved(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise ValueError("its description is not complete") from None
        state = self._state(slot)
        state.chmod(0o600)  # one that the server made by itself
        reason = distrust(saved, self._identity, n_slots, state.stat().st_size)
        if reason or saved.slot != slot:
            raise ValueError(reason or "its description is of another slot")
        if checksum(state) != (saved.n_bytes, saved.crc32):
            raise ValueError("its file is not what was saved")
        tokens = saved_tokens(state)
        if not tokens:
            raise ValueError("its file is not what was saved")
        try:
            self._slots.restore(slot, state.name)
            reason = difference(saved, self._replay(slot, tokens))
            if reason:
                raise ValueError(reason)
        except (RequestFailed, ValueError):
            self._slots.erase(slot)
            raise

    def _replay(self, slot: int, tokens: Sequence[int]) -> Replay:
        return self._slots.replay(slot, [*tokens, tokens[-1]], REPLAYED)

    def _settle(self, slots: Sequence[int]) -> None:
        """Give the slots their saved state again, without the continuation, and remember them so."""
        for slot in slots:
            try:
                self._slots.restore(slot, self._state(slot).name)
            except RequestFailed:  # a request of somebody took the memory: the slot is as useful as any
                continue
        try:
            now = {slot.id: slot for slot in self._slots.held()}
        except RequestFailed:
            return
        self._kept.update((slot, now[slot]) for slot in slots if slot in now)

    @contextmanager
    def _dropping(self, slot: int, dropped: list[str]) -> Iterator[None]:
        try:
            yield
        except (RequestFailed, OSError, ValueError) as error:
            dropped.append(f"the conversation in slot {slot} is dropped: {error}")
            self._useless = self._useless or isinstance(error, _CannotGoOn)

    @staticmethod
    def _make_private(path: Path) -> None:
        """An empty file that only this user may read: the server writes into it, and would make one for all to read."""
        path.unlink(missing_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def _delete(self, slot: int) -> None:
        for path in (self._state(slot), self._about(slot)):
            path.unlink(missing_ok=True)

    def _new(self, slot: int) -> Path:
        return self._folder / f"slot{slot}.new"

    def _state(self, slot: int) -> Path:
        return self._folder / f"slot{slot}.state"

    def _about(self, slot: int) -> Path:
        return self._folder / f"slot{slot}.json"


def is_due(now_s: float, saved_s: float, every_s: int) -> bool:
    """Whether to save at `now_s` when the last time was at `saved_s`. Pure; 0: only on stop."""
    return every_s > 0 and now_s - saved_s >= every_s


def checksum(path: Path) -> tuple[int, int]:
    """Size and CRC-32: against torn files, not against malice."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc
