"""Saved conversations come back exactly, and one that cannot be trusted is dropped, deleted, and said."""

from __future__ import annotations

import array
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
from engine_server import EngineServer, mtp, wait_until
from fake_world import until
from supervised import Run

from llama_phase.client import Client, RequestFailed
from llama_phase.companions import companions_for
from llama_phase.conversation_keeper import ConversationKeeper
from llama_phase.conversations import Conversations, Outcome, checksum, identity_of, is_due
from llama_phase.errors import UsageError
from llama_phase.port import free_port
from llama_phase.settings import Settings, argv
from llama_phase.slot_client import Replay, Slot, SlotClient, saved_tokens
from llama_phase.supervisor_status import SupervisorStatus

IDENTITY = {"model_bytes": 1, "model_mtime_ns": 2, "engine": "e"}


def packed(tokens: Sequence[int], n_media: int = 0) -> bytes:
    words = array.array("i", [0x67677371, 4, len(tokens) + 4, -1, 1, len(tokens), *tokens, n_media])
    return words.tobytes() + b"STATE"


class FakeSlots:
    """A server: slots of tokens, whose continuation depends on all of them; any request clears the idle slots."""

    def __init__(self, folder: Path, n: int = 2):
        self.folder, self.content, self.task = folder, [[] for _ in range(n)], [-1] * n
        self.busy, self.gone, self.refuses, self.off, self.forgets = False, False, "", 0.0, False
        self.n_tasks = self.status = 0

    def type(self, slot: int, *tokens: int) -> None:
        self.n_tasks += 1
        self.content[slot] += tokens
        self.task[slot] = self.n_tasks

    def held(self) -> list[Slot]:
        if self.gone:
            raise RequestFailed("no answer", status=self.status)
        return [Slot(i, len(tokens), self.task[i], self.busy) for i, tokens in enumerate(self.content)]

    def save(self, slot: int, filename: str) -> None:
        if self.refuses == "save":
            (self.folder / filename).write_bytes(b"half")
            raise RequestFailed("Unable to save slot", status=500)
        (self.folder / filename).write_bytes(packed(self.content[slot]))

    def restore(self, slot: int, filename: str) -> None:
        if self.refuses == "restore":
            raise RequestFailed("mismatched key type", status=400)
        self.content[slot] = saved_tokens(self.folder / filename) or []

    def erase(self, slot: int) -> None:
        self.content[slot] = []

    def replay(self, slot: int, tokens: Sequence[int], n: int) -> Replay:
        cached = 0 if self.forgets else sum(a == b for a, b in zip(tokens, self.content[slot], strict=False))
        answer = [hash((*tokens, i)) % 1000 for i in range(n)]
        for other in range(len(self.content)):
            if other != slot:
                self.erase(other)
        self.content[slot] = list(tokens)
        self.type(slot, *answer)
        return Replay(answer, [-1.0 + self.off] * n, cached)


@pytest.fixture
def server(tmp_path: Path) -> FakeSlots:
    fake = FakeSlots(tmp_path)
    fake.type(0, 1, 2, 3)
    fake.type(1, 7, 8)
    return fake


def keeper(server: FakeSlots, **identity: object) -> Conversations:
    return Conversations(server.folder, server, IDENTITY | identity)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def after_restart(server: FakeSlots, **identity: object) -> tuple[FakeSlots, Outcome]:
    fresh = FakeSlots(server.folder)
    return fresh, keeper(fresh, **identity).restore()


BOTH = ["slot0.json", "slot0.state", "slot1.json", "slot1.state"]


def test_what_was_saved_comes_back_and_nothing_more(server: FakeSlots) -> None:
    assert keeper(server).save() == Outcome((0, 1))
    assert server.content == [[1, 2, 3], [7, 8]], "the continuation stays in no slot"
    assert files(server.folder) == BOTH
    fresh, outcome = after_restart(server)
    assert outcome == Outcome((0, 1)) and fresh.content == [[1, 2, 3], [7, 8]]


def test_what_was_said_is_for_this_user_only_at_any_time(server: FakeSlots) -> None:
    """Also in a folder that others may read."""
    server.folder.chmod(0o755)
    (server.folder / "slot0.new").touch(0o644)  # left by a power loss
    modes: set[int] = set()
    save = server.save

    def watched(slot: int, filename: str) -> None:
        save(slot, filename)
        modes.add((server.folder / filename).stat().st_mode & 0o777)

    server.save = watched  # type: ignore[method-assign]
    keeper(server).save()
    modes |= {(server.folder / name).stat().st_mode & 0o777 for name in BOTH}
    assert modes == {0o600}


def test_only_what_changed_is_saved_again(server: FakeSlots) -> None:
    conversations = keeper(server)
    conversations.save()
    assert conversations.save() == Outcome()
    server.type(1, 9)
    assert conversations.save() == Outcome((1,))
    assert after_restart(server)[0].content == [[1, 2, 3], [7, 8, 9]]


def test_nothing_is_saved_again_right_after_it_was_restored(server: FakeSlots) -> None:
    keeper(server).save()
    fresh = FakeSlots(server.folder)
    conversations = keeper(fresh)
    conversations.restore()
    assert conversations.save() == Outcome()


def test_an_empty_slot_leaves_what_it_held_before(server: FakeSlots) -> None:
    conversations = keeper(server)
    conversations.save()
    server.erase(0)  # moved to the server's cache in host memory
    conversations.save()
    assert after_restart(server)[0].content[0] == [1, 2, 3]


def test_nothing_happens_while_a_request_runs(server: FakeSlots) -> None:
    server.busy = True
    assert keeper(server).save() == Outcome() and files(server.folder) == []


@pytest.mark.parametrize("refuses", ["save", "restore"])
def test_a_failed_save_keeps_the_saved_one_before_it(server: FakeSlots, refuses: str) -> None:
    conversations = keeper(server)
    conversations.save()
    server.type(0, 4)
    server.refuses = refuses
    outcome = conversations.save()
    assert outcome.slots == () and "slot 0 is dropped" in outcome.dropped[0]
    assert files(server.folder) == BOTH
    assert after_restart(server)[0].content[0] == [1, 2, 3]


def test_a_model_that_cannot_go_on_from_a_state_is_found_at_saving(server: FakeSlots) -> None:
    server.forgets = True
    conversations, before = keeper(server), server.n_tasks
    assert "cannot go on" in conversations.save().dropped[0]
    assert files(server.folder) == []
    assert conversations.save() == Outcome() and server.n_tasks == before + 1, (
        "a whole prompt is computed once, not more"
    )


def test_a_server_that_is_gone_is_said(server: FakeSlots) -> None:
    server.gone = True
    assert "not saved" in keeper(server).save().dropped[0] and "not restored" in keeper(server).restore().dropped[0]


def edit(folder: Path, **changes: object) -> None:
    path = folder / "slot0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip(folder: Path) -> None:
    path = folder / "slot0.state"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "its file is not complete": lambda folder: (folder / "slot0.state").write_bytes(packed([1])[:20]),
    "its file is not what was saved": flip,
    "No such file": lambda folder: (folder / "slot0.state").unlink(),
    "its description is not complete": lambda folder: (folder / "slot0.json").write_text('{"slot": 0'),
    "of another slot": lambda folder: edit(folder, slot=1),
    "with other tokens": lambda folder: edit(folder, expected_tokens=[5, 5, 5, 5]),
    "took 3 of its 4 tokens": lambda folder: edit(folder, n_tokens=4),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_what_cannot_be_trusted_is_dropped_said_and_not_tried_again(server: FakeSlots, reason: str) -> None:
    keeper(server).save()
    DAMAGE[reason](server.folder)
    fresh, outcome = after_restart(server)
    assert outcome.slots == (1,) and len(outcome.dropped) == 1
    assert "slot 0 is dropped" in outcome.dropped[0] and reason in outcome.dropped[0]
    assert fresh.content == [[], [7, 8]] and files(server.folder) == BOTH[2:]


@pytest.mark.parametrize(
    ("identity", "reason"), [({"engine": "f"}, "another engine"), ({"model_mtime_ns": 3}, "another model")]
)
def test_another_model_or_engine_takes_none(server: FakeSlots, identity: dict[str, object], reason: str) -> None:
    keeper(server).save()
    fresh, outcome = after_restart(server, **identity)
    assert outcome.slots == () and all(reason in text for text in outcome.dropped) and len(outcome.dropped) == 2
    assert fresh.n_tasks == 0 and files(server.folder) == []


def test_other_probabilities_and_fewer_slots(server: FakeSlots) -> None:
    keeper(server).save()
    fresh = FakeSlots(server.folder, n=1)
    fresh.off = 0.2
    first, second = keeper(fresh).restore().dropped
    assert "other probabilities" in first and "only 1 slots" in second


def test_images_are_not_replayed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(packed([1], n_media=1))
    assert saved_tokens(tmp_path / "a") is None


@pytest.mark.parametrize("size", [0, 3, 11, 13, 27])
def test_a_file_that_ends_early_or_is_another_one_is_an_error(tmp_path: Path, size: int) -> None:
    (tmp_path / "a").write_bytes(packed([1, 2, 3])[:size])
    with pytest.raises(ValueError):
        saved_tokens(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"GGUF" * 20)
    with pytest.raises(ValueError, match="no saved slot"):
        saved_tokens(tmp_path / "a")


def test_intervals() -> None:
    assert is_due(300, 0, 300) and not is_due(299, 0, 300) and not is_due(10**9, 0, 0)


def test_the_server_is_told_where_to_save(tmp_path: Path) -> None:
    words = argv(Settings.load(model="m", port=1, keep_conversations=True, state_dir=tmp_path))
    assert words[words.index("--slot-save-path") + 1] == str(tmp_path / "conversations" / "port1")
    given = Settings.load(model="m", keep_conversations=True, upstream=["--slot-save-path", "/x"])
    assert argv(given).count("--slot-save-path") == 1 and given.conversations_path == Path("/x")
    assert "--slot-save-path" not in argv(Settings.load(model="m"))


def test_a_port_that_is_another_one_each_time_is_refused_before_loading(tmp_path: Path) -> None:
    given = {"model": "m", "port": 0, "keep_conversations": True, "state_dir": tmp_path, "metrics_port": 1}
    with pytest.raises(UsageError, match="by port"):
        companions_for(Settings.load(**given), SupervisorStatus(), print)
    for more in ({"port": 1}, {"upstream": ["--slot-save-path", "/x"]}):
        for companion in companions_for(Settings.load(**given | more | {"metrics_port": 0}), SupervisorStatus(), print):
            companion.close()


def keep(server: FakeSlots, said: list[str], **settings: object) -> ConversationKeeper:
    model = server.folder / "m.gguf"
    if not model.exists():
        model.touch()
    given = {"model": model, "upstream": ["--slot-save-path", str(server.folder)], "keep_conversations": True}
    return ConversationKeeper(Settings.load(**given | settings), said.append, connect=lambda: ServedSlots(server))


class ServedSlots(SlotClient):
    """The fake behind the interface of the real client."""

    def __init__(self, fake: FakeSlots):
        super().__init__("http://127.0.0.1:1")
        for name in ("held", "save", "restore", "erase", "replay"):
            setattr(self, name, getattr(fake, name))

    def props(self, *, timeout_s: float | None = 10.0) -> dict[str, object]:
        return {"build_info": "e"}


def test_the_life_of_a_server_as_its_keeper_sees_it(server: FakeSlots) -> None:
    said: list[str] = []
    keeper = keep(server, said)
    keeper.ready()
    keeper.stopping(within_s=10)
    assert said == ["conversations saved: slots 0, 1"]
    fresh = FakeSlots(server.folder)
    keeper = keep(fresh, said)
    flip(server.folder)
    keeper.ready()
    keeper.gone()
    assert said[1] == "conversations restored: slot 1" and "slot 0 is dropped" in said[2]
    assert fresh.content == [[], [7, 8]]


def test_it_saves_at_intervals_too(server: FakeSlots) -> None:
    keeper = keep(server, [], conversations_every_s=1)
    keeper.ready()
    wait_until(lambda: files(server.folder) == ["m.gguf", *BOTH], "an interval passed")
    keeper.gone()


def test_the_same_failure_at_every_interval_is_said_once(server: FakeSlots) -> None:
    said: list[str] = []
    keeper = keep(server, said, conversations_every_s=1)
    keeper.ready()
    asked = 0

    def refuse() -> list[Slot]:
        nonlocal asked
        asked += 1
        raise RequestFailed("disk full", status=500)

    assert keeper._life is not None
    keeper._life._client.held = refuse  # type: ignore[method-assign]
    wait_until(lambda: asked == 2, "two intervals passed")
    keeper.gone()
    assert said == ["conversations are not saved: disk full"]


def test_a_server_without_slots_is_asked_once(server: FakeSlots) -> None:
    server.gone = True
    conversations = keeper(server)
    server.status = 501
    assert len(conversations.save().dropped) == 1 and conversations.save() == Outcome()


def test_a_sleeping_server_is_not_woken(server: FakeSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedSlots, "props", lambda self, **_: {"build_info": "e", "is_sleeping": True})
    upstream = ["--slot-save-path", str(server.folder), "--sleep-idle-seconds", "1"]
    keeper = keep(server, [], conversations_every_s=1, upstream=upstream)
    keeper.ready()
    assert keeper._life is not None and keeper._life._every_s == 0
    keeper.stopping(within_s=10)
    assert files(server.folder) == ["m.gguf"]


def test_a_server_that_does_not_answer_holds_up_the_stop_no_longer_than_it_may(server: FakeSlots) -> None:
    keeper, released = keep(server, []), threading.Event()
    keeper.ready()
    server.busy = True
    server.held = lambda: released.wait(30) and []  # type: ignore[method-assign]
    keeper.stopping(within_s=0.1)
    released.set()


def test_off_it_does_nothing(server: FakeSlots) -> None:
    said: list[str] = []
    keeper = keep(server, said, keep_conversations=False)
    keeper.prepare()
    keeper.ready()
    keeper.stopping(within_s=10)
    keeper.gone()
    assert said == [] and files(server.folder) == ["m.gguf"]


@pytest.mark.engine
@pytest.mark.parametrize("model", ["qwen3moe", "qwen35moe"])
def test_with_the_real_server(one_server, prompt, model: str, tmp_path: Path, model_path) -> None:
    """An attention and a recurrent model: after a restart the conversation goes on as it would have, from its cache."""
    folder = tmp_path / "conversations"
    folder.mkdir()
    path, words = model_path(model), prompt(model, 400)

    def start() -> tuple[EngineServer, SlotClient, Conversations]:
        server = one_server(model, "--slot-save-path", str(folder))
        client = SlotClient(f"http://127.0.0.1:{server.port}")
        return server, client, Conversations(folder, client, identity_of(path, client.props()))

    server, client, conversations = start()
    with client:
        answer = server.complete(words, n=8, cache=True)
        conversation = [*words, *answer.tokens]
        assert conversations.save() == Outcome((0,)) and conversations.save() == Outcome()
        more = [*conversation, *prompt(model, 40, seed=2)]
        expected = server.complete(more, n=8, cache=True)
        assert expected.n_cached >= len(conversation) - 1, "saving left the slot as it was"
        server.stop()

    server, client, conversations = start()
    with client:
        assert conversations.restore() == Outcome((0,))
        again = server.complete(more, n=8, cache=True)
        assert again == expected and again.n_cached == expected.n_cached
        server.stop()

    state = folder / "slot0.state"
    data = bytearray(state.read_bytes())
    data[len(data) // 4 : -len(data) // 4] = bytes(len(data[len(data) // 4 : -len(data) // 4]))
    state.write_bytes(data)
    about = folder / "slot0.json"
    n_bytes, crc32 = checksum(state)
    about.write_text(json.dumps(json.loads(about.read_text()) | {"n_bytes": n_bytes, "crc32": crc32}))
    server, client, conversations = start()
    with client:
        outcome = conversations.restore()
        assert outcome.slots == () and "slot 0 is dropped" in outcome.dropped[0], (
            "a damaged state is found by replaying"
        )
        assert server.complete(more, n=8, cache=True).n_cached == 0


@pytest.mark.engine
@pytest.mark.parametrize("model", ["qwen4exp", "qwen35moe"])
def test_a_replay_drafts_nothing(one_server, prompt, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which lengths would be chosen then is not those of before, and tokens come in batches of other shapes."""
    words = prompt(model, 60)
    server = one_server(model, "-np", "1", *mtp(3))
    answer = server.complete(words, n=30, cache=True)
    assert answer.timings["draft_n_accepted"] > 0
    held = [*words, *answer.tokens[:-1]]
    drafted = []

    def recorded(client: SlotClient, *args: object, **more: object) -> object:
        done = Client.completion(client, *args, **more)  # type: ignore[arg-type]
        drafted.append(done.timings.get("draft_n", 0))
        return done

    monkeypatch.setattr(SlotClient, "completion", recorded)
    with SlotClient(f"http://127.0.0.1:{server.port}") as client:
        replay = client.replay(0, [*held, held[-1]], 8)
        server.complete(held, n=1, cache=True)
        again = client.replay(0, [*held, held[-1]], 8)
    assert set(drafted) == {0}
    assert len(replay.tokens) == len(replay.logprobs) == 8 and replay.n_cached == len(held)
    assert again.tokens == replay.tokens
    assert again.logprobs == pytest.approx(replay.logprobs, abs=0.05)


@pytest.mark.engine
def test_under_a_supervisor_it_outlives_a_stop_and_a_crash(real: Callable[..., Run], prompt) -> None:
    port = free_port("127.0.0.1")
    options = {"keep_conversations": True, "conversations_every_s": 1, "port": port}

    def ask(words: Sequence[int]) -> dict:
        body = EngineServer.request(words, 8, cache=True, n_probs=0)
        return httpx.post(f"http://127.0.0.1:{port}/completion", json=body, timeout=60).json()

    def said(it: Run, what: str) -> None:
        until(lambda: any(what in sentence for sentence in it.status.notes), what)

    it = real(**options)
    it.until_state("ready")
    words = [*prompt("qwen3moe", 400)]
    words += ask(words)["tokens"]
    it.signals.stop = True
    it.until_over()
    it = real(**options)
    said(it, "conversations restored: slot 0")
    answer = ask([*words, 5, 6])
    assert answer["timings"]["cache_n"] == len(words) - 1  # all but the last token, which was only sampled
    words += [5, 6, *answer["tokens"]]
    about = it.folder / "conversations" / f"port{port}" / "slot0.json"
    until(lambda: json.loads(about.read_text())["n_tokens"] == len(words) - 1, "saved again")
    os.kill(it.status.server_pid or 0, signal.SIGKILL)
    until(lambda: it.status.restarts == 1 and it.status.state == "ready", "ready again")
    said(it, "conversations restored: slot 0")
    assert ask([*words, 7])["timings"]["cache_n"] == len(words) - 1
