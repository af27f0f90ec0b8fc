"""The journal of configurations that served: right after a stop at any byte, and for any order of records."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from fake_gguf import write_gguf
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llama_phase.configuration import Configuration, configuration_of, difference, environment_for, settings_for
from llama_phase.durable_file import Disk, RealDisk
from llama_phase.errors import ModelError
from llama_phase.journal import KEEP, KEEP_GOOD, Journal, check_files
from llama_phase.settings import Settings

A, B, C = (Configuration({"model": f"/m/{name}.gguf"}, {}, "engine") for name in "abc")


class PowerLoss(BaseException):
    """The machine is gone; nothing may catch it as an error."""


class FailingDisk:
    """A disk of which only what was synced is there after a power loss, and which stops after `budget` bytes or steps.

    A rename that was not synced may be lost or not: both are tried (`renames_last`).
    """

    def __init__(self, budget: int, *, full: bool = False, renames_last: bool = True):
        self.budget, self.full, self.renames_last = budget, full, renames_last
        self._real: Disk = RealDisk()
        self._unsynced: dict[Path, bytes] = {}
        self._renamed: list[tuple[Path, bytes | None]] = []

    def _spend(self, cost: int = 1) -> int:
        done = min(cost, self.budget)
        self.budget -= done
        return done

    def _stop(self) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        raise PowerLoss

    def create(self, path: Path, content: bytes) -> None:
        done = self._spend(len(content))
        self._real.create(path, content[:done])
        self._unsynced[path] = content[:done]
        if done < len(content):
            self._stop()

    def sync(self, path: Path) -> None:
        if not self._spend():
            self._stop()
        self._unsynced.pop(path, None)

    def rename(self, old: Path, new: Path) -> None:
        if not self._spend():
            self._stop()
        self._renamed.append((new, new.read_bytes() if new.exists() else None))
        if old in self._unsynced:
            self._unsynced[new] = self._unsynced.pop(old)
        self._real.rename(old, new)

    def sync_folder(self, folder: Path) -> None:
        if not self._spend():
            self._stop()
        self._renamed.clear()

    def remove(self, path: Path) -> None:
        if not self._spend():
            self._stop()
        self._real.remove(path)

    def lose_power(self) -> None:
        """What a restart finds: data that was not synced is cut in half, names may be the old ones."""
        for path, content in self._unsynced.items():
            if path.exists():
                path.write_bytes(content[: len(content) // 2])
        for path, before in self._renamed if not self.renames_last else ():
            if before is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(before)


def good(folder: Path) -> list[Configuration]:
    return [record.configuration for record in Journal(folder).good()]


def test_what_served_is_there_newest_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "served")
    assert journal.good() == []
    for configuration in (A, B, A, A):
        journal.served(configuration)
    assert good(tmp_path / "served") == [A, B]
    assert [record.number for record in journal.records()] == [1, 2, 3], "the same again is no new record"
    journal.failed(A, "it crashed")
    assert good(tmp_path / "served") == [B]
    journal.failed(C, "never served")
    assert len(journal.records()) == 4
    journal.served(A)
    assert good(tmp_path / "served") == [A, B]


@pytest.mark.parametrize("renames_last", [True, False])
def test_power_loss_at_any_byte_costs_the_new_record_at_most(tmp_path: Path, renames_last: bool) -> None:
    base = tmp_path / "base"
    Journal(base).served(A)
    whole = (base / "000001-ok.json").stat().st_size
    outcomes = []
    for budget in (*range(0, whole, 7), *range(whole, whole + 8)):
        folder = tmp_path / f"at-{budget}"
        shutil.copytree(base, folder)
        disk = FailingDisk(budget, renames_last=renames_last)
        finished = False
        try:
            Journal(folder, disk=disk).served(B)
            finished = True
        except PowerLoss:
            pass
        disk.lose_power()
        found = good(folder)
        assert found in ([A], [B, A])
        assert not finished or found == [B, A], "what was confirmed is there"
        outcomes.append(found)
        Journal(folder).served(C)
        assert good(folder)[0] == C and A in good(folder), "it goes on"
    assert [A] in outcomes and [B, A] in outcomes


def test_a_full_disk_is_an_error_and_harms_nothing(tmp_path: Path) -> None:
    Journal(tmp_path).served(A)
    for budget in (0, 10, 100):
        with pytest.raises(OSError, match="No space left"):
            Journal(tmp_path, disk=FailingDisk(budget, full=True)).served(B)
        assert good(tmp_path) == [A]
    Journal(tmp_path).served(B)
    assert not list(tmp_path.glob("*.tmp"))


def test_any_damaged_byte_costs_that_record_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.served(A)
    journal.served(B)
    path = tmp_path / "000002-ok.json"
    content = path.read_bytes()
    for position in range(len(content) - 1):  # the last is a line break
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        assert good(tmp_path) in ([A], [B, A])
        path.write_bytes(content[:position])
        assert good(tmp_path) in ([A], [B, A])
    for strange in (b"", b"[]", b"null", b'{"record": 1, "sha256": 2}', b"\xff\xfe"):
        path.write_bytes(strange)
        assert good(tmp_path) == [A]
    journal.served(C)
    assert (tmp_path / "000003-ok.json").exists(), "the number of a damaged record is not used again"


def test_the_newest_good_one_outlives_any_number_of_bad_records(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.served(A)
    for index in range(3 * KEEP):
        other = Configuration({"model": f"/m/{index}"}, {}, "engine")
        journal.served(other)
        journal.failed(other, "bad")
    assert good(tmp_path) == [A] and len(list(tmp_path.iterdir())) <= KEEP + KEEP_GOOD


class Histories(RuleBasedStateMachine):
    """Records and power losses in any order, against a list in memory."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="journal-"))
        self.expected: list[Configuration] = []

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    def after(self, configuration: Configuration, ok: bool) -> list[Configuration]:
        others = [item for item in self.expected if item != configuration]
        return [configuration, *others] if ok else others

    @rule(configuration=st.sampled_from([A, B, C]), ok=st.booleans())
    def write(self, configuration: Configuration, ok: bool) -> None:
        journal = Journal(self.folder)
        journal.served(configuration) if ok else journal.failed(configuration, "bad")
        self.expected = self.after(configuration, ok)

    @rule(
        configuration=st.sampled_from([A, B, C]),
        ok=st.booleans(),
        budget=st.integers(0, 400),
        renames_last=st.booleans(),
    )
    def stop_in_the_middle(self, configuration: Configuration, ok: bool, budget: int, renames_last: bool) -> None:
        disk = FailingDisk(budget, renames_last=renames_last)
        journal = Journal(self.folder, disk=disk)
        wanted, finished = self.after(configuration, ok), False
        try:
            journal.served(configuration) if ok else journal.failed(configuration, "bad")
            finished = True
        except PowerLoss:
            pass
        disk.lose_power()
        found = good(self.folder)
        assert found == wanted or (not finished and found == self.expected)
        self.expected = found

    @invariant()
    def what_is_read_is_what_was_written(self) -> None:
        if hasattr(self, "folder"):
            assert good(self.folder) == self.expected


TestHistories = Histories.TestCase
TestHistories.settings = hypothesis_settings(max_examples=60, stateful_step_count=25, deadline=None)


# --- what a configuration is ------------------------------------------------------------------------------------------


def test_a_configuration_survives_the_journal_and_makes_the_same_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llama_phase.settings import argv

    monkeypatch.setenv("LLAMA_PHASE_API_KEY", "hush")
    monkeypatch.setenv("LLAMA_PHASE_STATE_DIR", str(tmp_path))
    asked = Settings.load(
        model=tmp_path / "m.gguf", port=9001, ctx=4096, prefill_ubatch=1024, upstream=["-ngl", "9", "-t", "2"]
    )
    base = {"GGML_CUDA_P2P": "1", "HF_TOKEN": "x", "LLAMA_API_KEY": "y", "PATH": "/bin", "LLAMA_ARG_THREADS": "3"}
    Journal(tmp_path / "served").served(configuration_of(asked, "engine-1", base))
    found = Journal(tmp_path / "served").good()[0].configuration
    text = "".join(path.read_text() for path in (tmp_path / "served").iterdir())
    assert "hush" not in text and '"y"' not in text and "PATH" not in text
    now = Settings.load(model=tmp_path / "other.gguf", port=9002, ctx=99)
    back = settings_for(found, now)
    assert argv(back) == argv(asked.model_copy(update={"port": 9002}))
    assert back.api_key is not None and back.prefill_ubatch == 1024
    environment = environment_for(found, {"PATH": "/usr/bin", "GGML_CUDA_DISABLE_GRAPHS": "1", "LLAMA_API_KEY": "z"})
    assert environment == {
        "PATH": "/usr/bin", "LLAMA_API_KEY": "z", "GGML_CUDA_P2P": "1", "LLAMA_ARG_THREADS": "3"
    }  # fmt: skip
    assert "ctx: 99 -> 4096" in difference(configuration_of(now, "engine-1", base), found)


def test_a_configuration_of_an_earlier_version_gets_the_defaults_of_newer_settings(tmp_path: Path) -> None:
    from llama_phase.configuration import NOT_OF_THE_SERVER

    assert set(Settings.model_fields) >= NOT_OF_THE_SERVER
    now = Settings.load(model=tmp_path / "m.gguf", ubatch=64, ctx=99)
    old = Configuration({"model": "/m.gguf", "of_another_version": 1}, {}, "e")
    back = settings_for(old, now)
    assert (back.model, back.ubatch, back.ctx) == (Path("/m.gguf"), 512, None)
    with pytest.raises(ValueError, match="ubatch"):
        settings_for(Configuration({"model": "/m.gguf", "ubatch": "many"}, {}, "e"), now)


def test_where_it_listens_and_how_it_is_watched_is_no_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = Settings.load(model=tmp_path / "m.gguf", port=1, grace_s=1, api_key="a")
    other = Settings.load(model=tmp_path / "m.gguf", port=2, grace_s=2, api_key="b")
    assert configuration_of(one, "e", {}) == configuration_of(other, "e", {"HOME": "/x"})
    fingerprint = configuration_of(one, "e", {}).fingerprint
    assert fingerprint == configuration_of(one, "f", {}).fingerprint, (
        "an engine that was replaced is not there any more"
    )
    assert fingerprint != configuration_of(one, "e", {"GGML_X": "1"}).fingerprint
    assert fingerprint != configuration_of(one.model_copy(update={"ubatch": 3}), "e", {}).fingerprint


def test_files_are_looked_for_where_the_supervisor_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = str(write_gguf(tmp_path / "m.gguf"))
    with_draft = Configuration({"model": model, "upstream": ["-md", "d.gguf"]}, {}, "")
    check_files(Configuration({"model": model}, {}, ""), tmp_path)
    with pytest.raises(ModelError, match=r"d\.gguf"):
        check_files(with_draft, tmp_path)
    write_gguf(tmp_path / "d.gguf")
    check_files(with_draft, tmp_path)
