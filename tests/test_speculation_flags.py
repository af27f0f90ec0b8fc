"""--mtp, --spec and --draft-device: the flags they become, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from engine_server import ROOT
from fake_gguf import TRUNK, write_gguf
from sparse_gguf import write_flash_next

from llama_phase.cli import app
from llama_phase.cli_serve import with_values
from llama_phase.env import child_environment
from llama_phase.errors import LlamaPhaseError, ModelError, UsageError
from llama_phase.gguf_header import check_model
from llama_phase.settings import Settings, argv
from llama_phase.speculation import NO_LAYER_INPUTS, TYPES, with_speculation

BLOCK = (*TRUNK, "blk.2.nextn.eh_proj.weight")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "mtp.gguf", {".block_count": 3, ".nextn_predict_layers": 1}, BLOCK)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "plain.gguf")


def resolved(model: Path, *upstream: str, draft_file: Path | None = None, **flags: object) -> Settings:
    settings = Settings.load(model=model, upstream=upstream, **flags)
    drafts = check_model(draft_file, draft=True) if draft_file else []
    once = with_speculation(settings, check_model(model), drafts)
    assert with_speculation(once, check_model(model), drafts) == once
    return once


def words(settings: Settings) -> str:
    return " ".join(word for word in argv(settings) if "spec" in word or not word.startswith(("-", "/")))


@pytest.mark.parametrize(
    ("given", "mtp", "after"),
    [
        ("MODEL --mtp", "auto", ()),
        ("--mtp MODEL", "auto", ()),
        ("--mtp somewhere/else.gguf", "auto", ()),
        ("MODEL --mtp --port 0", "auto", ()),
        ("MODEL --mtp -- -ngl 99", "auto", ("-ngl", "99")),
        ("--mtp 3 MODEL", "3", ()),
        ("--mtp=off MODEL", "off", ()),
        ("MODEL -- --mtp", None, ("--mtp",)),
        ("--mtp auto MODEL -- --mtp", "auto", ("--mtp",)),
        ("--mtp on MODEL", "on", ()),  # refused as a value, not taken for a model
    ],
)
def test_mtp_without_a_value_is_auto_and_swallows_no_model(
    model: Path, given: str, mtp: str | None, after: tuple[str, ...]
) -> None:
    path = str(model.rename(model.with_suffix("")))  # only that it is there says that it is a model
    words = given.replace("MODEL", path).split()
    serve = typer.main.get_command(app).commands["serve"]
    params = serve.make_context("serve", with_values(words)).params
    assert (params["mtp"], tuple(params["upstream"] or ())) == (mtp, after)
    assert str(params["model"]) in (path, "somewhere/else.gguf")


@pytest.mark.parametrize("order", [("MODEL", "--mtp"), ("--mtp", "MODEL")])
def test_mtp_without_a_value_on_the_command_line(tmp_path: Path, order: tuple[str, str]) -> None:
    model = str(write_flash_next(tmp_path, layers=8, n_expert=32))
    command = [sys.executable, "-m", "llama_phase.cli", "plan", "--vram", "24", "--ctx", "4096", "--json"]
    command += [model if word == "MODEL" else word for word in order]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert json.loads(done.stdout)["plan"]["choices"]["draft_tokens"] == 7, done.stderr


def test_off_changes_nothing(model: Path) -> None:
    settings = Settings.load(model=model)
    assert with_speculation(settings, check_model(model)) is settings
    assert "spec" not in words(settings)


def test_auto_is_on_where_there_is_a_block(model: Path, plain: Path) -> None:
    settings = resolved(model, mtp="auto")
    assert "--spec-type draft-mtp --spec-draft-n-max 7" in words(settings)
    assert child_environment(settings)["LLAMA_PHASE_DRAFT"] == "auto"
    assert "spec" not in words(resolved(plain, mtp="auto"))
    assert "n-max 3" in words(resolved(model, mtp="auto", expert_batch=4))
    assert "spec" not in words(resolved(model, mtp="auto", expert_batch=1))


def test_a_number_is_a_fixed_length(model: Path) -> None:
    assert resolved(model, mtp="off").mtp == 0 and "spec" not in words(resolved(model, mtp="off"))
    settings = resolved(model, mtp=3)
    assert "--spec-type draft-mtp --spec-draft-n-max 3" in words(settings)
    assert "LLAMA_PHASE_DRAFT" not in child_environment(settings)
    assert child_environment(resolved(model, mtp=3, draft="auto"))["LLAMA_PHASE_DRAFT"] == "auto"


def test_flags_after_the_dashes_win(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "n-max 5" in words(resolved(model, "--spec-draft-n-max", "5", mtp="auto"))
    assert "draft-mtp" not in words(resolved(model, "--spec-type", "ngram-mod", mtp="auto"))
    assert "n-max 2" in words(resolved(model, "--spec-type", "draft-mtp,ngram-mod", mtp=2))
    monkeypatch.setenv("LLAMA_PHASE_DRAFT", "off")
    assert resolved(model, mtp="auto").draft == "off"


def test_other_types_pass(model: Path, plain: Path) -> None:
    assert "--spec-type ngram-mod" in words(resolved(plain, spec="ngram-mod"))
    assert "--spec-type ngram-mod,draft-mtp" in words(resolved(model, spec="ngram-mod", mtp=3))
    assert "CUDA1" in argv(resolved(plain, "-md", str(model), draft_file=model, mtp=3, draft_device="CUDA1"))


@pytest.mark.parametrize(
    ("upstream", "flags", "kind", "part"),
    [
        ((), {"spec": "ngram-simpel"}, UsageError, "ngram-simple"),
        (("--spec-type", "draft-dflesh"), {}, UsageError, "draft-dflash"),
        ((), {"mtp": 3}, ModelError, "no MTP block"),
        (("--spec-type", "draft-mtp"), {}, ModelError, "no MTP block"),
        (("--spec-type", "ngram-mod"), {"mtp": 3}, UsageError, "differ"),
        (("--spec-type", "ngram-mod"), {"spec": "ngram-cache"}, UsageError, "differ"),
        ((), {"spec": "draft-eagle3"}, UsageError, "draft model"),
    ],
)
def test_refused(plain: Path, upstream: tuple[str, ...], flags: dict, kind: type[LlamaPhaseError], part: str) -> None:
    with pytest.raises(kind) as caught:
        resolved(plain, *upstream, **flags)
    assert caught.value.fix and part in f"{caught.value} | {caught.value.fix}"


def test_drafts_that_slots_cannot_verify(model: Path) -> None:
    with pytest.raises(UsageError, match="verified 9 at a time") as caught:
        resolved(model, mtp=8, expert_slots=128)
    assert "LLAMA_PHASE_EXPERT_BATCH=9" in caught.value.fix
    resolved(model, mtp=8)
    resolved(model, mtp=8, expert_slots=128, expert_batch=9)


@pytest.mark.parametrize("architecture", NO_LAYER_INPUTS)
@pytest.mark.parametrize("kind", ["draft-dflash", "draft-dspark", "draft-eagle3"])
def test_drafts_that_read_layers_where_there_is_nothing_to_read(tmp_path: Path, architecture: str, kind: str) -> None:
    names = {".full_attention_interval": 1, ".attention.key_length": 4}
    target = write_gguf(tmp_path / "target.gguf", names, architecture=architecture)
    draft = write_gguf(tmp_path / "draft.gguf")
    with pytest.raises(UsageError, match=f"{kind} does not work on {architecture}"):
        resolved(target, "-md", str(draft), draft_file=draft, spec=kind)
    resolved(write_gguf(tmp_path / "other.gguf"), "-md", str(draft), draft_file=draft, spec=kind)


def test_lists_are_those_of_the_pinned_source() -> None:
    source = ROOT / "llama.cpp"
    if not source.exists():
        pytest.skip("no source, run make source")
    table = (source / "common/speculative.cpp").read_text().split("common_speculative_type_from_name_map = {")[1]
    assert set(TYPES) == set(re.findall(r'{"([a-z0-9-]+)",', table.split("};")[0]))
    for architecture in NO_LAYER_INPUTS:
        given = re.findall(r"t_layer_inp\[il\] = (\w+);", (source / f"src/models/{architecture}.cpp").read_text())
        assert given in ([], ["res_hc"]), f"{architecture} gives {given} now"
