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
from llama_phase.speculation import (
    ASSISTANT,
    LAYER_INPUTS,
    MTP_GRAPHS,
    MTP_OF_ONE_BLOCK,
    NGRAM_LENGTHS,
    READS_LAYERS,
    TYPES,
    UPSTREAM_N_MAX,
    WIDENED,
    notes,
    with_speculation,
)

BLOCK = (*TRUNK, "blk.2.nextn.eh_proj.weight")
HYBRID = {".full_attention_interval": 1, ".attention.key_length": 4}  # what such an architecture is checked for


def with_block(path: Path, architecture: str = "qwen35moe", tensors: tuple[str, ...] = BLOCK, **keys: object) -> Path:
    metadata = {".block_count": 3, ".nextn_predict_layers": 1, **HYBRID} | {f".{key}": keys[key] for key in keys}
    return write_gguf(path, metadata, tensors, architecture=architecture)


def of_layers(path: Path, architecture: str = "dflash", *tensors: str, **keys: object) -> Path:
    """A draft that reads the layers' inputs."""
    return write_gguf(path, {f".{key}": keys[key] for key in keys}, (*TRUNK, *tensors), architecture=architecture)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return with_block(tmp_path / "mtp.gguf")


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


@pytest.mark.parametrize("architecture", ["glm5-next", "kimi-k3", "qwen4exp", "qwen3vlmoe", "glm4moe"])
@pytest.mark.parametrize("kind", list(READS_LAYERS))
def test_drafts_that_read_layers_where_there_is_nothing_to_read(tmp_path: Path, architecture: str, kind: str) -> None:
    target = write_gguf(tmp_path / "target.gguf", HYBRID, architecture=architecture)
    draft = of_layers(tmp_path / "draft.gguf", READS_LAYERS[kind])
    with pytest.raises(UsageError, match=f"{kind} does not work on {architecture}"):
        resolved(target, "-md", str(draft), draft_file=draft, spec=kind)
    other = write_gguf(tmp_path / "other.gguf")
    resolved(other, "-md", str(draft), draft_file=draft, spec=kind)
    with pytest.raises(UsageError, match=f"needs one of {READS_LAYERS[kind]}"):
        resolved(other, "-md", str(other), draft_file=other, spec=kind)


@pytest.mark.parametrize(
    ("draft", "tensors", "kind"),
    [("dflash", (), "draft-dflash"), ("dflash", ("markov_w1.weight",), "draft-dspark"), ("eagle3", (), "")],
)
def test_types_that_the_server_reads_from_the_draft(
    tmp_path: Path, plain: Path, draft: str, tensors: tuple[str, ...], kind: str
) -> None:
    file = of_layers(tmp_path / "draft.gguf", draft, *tensors)
    target = write_gguf(tmp_path / "target.gguf", HYBRID, architecture="qwen4exp")
    given = ("-md", str(file))
    if kind:
        with pytest.raises(UsageError, match=f"{kind} does not work on qwen4exp"):
            resolved(target, *given, draft_file=file)
    for settings in (
        resolved(plain, *given, draft_file=file),
        resolved(target, *given, "--spec-type", "none", draft_file=file),
        resolved(target, *given, "--spec-default", draft_file=file),
    ):
        assert settings.upstream[:2] == given and "draft" not in words(settings).split(str(file))[-1]
    unused = notes(resolved(plain, *given, draft_file=file), check_model(plain), check_model(file, draft=True))
    assert ("drafts nothing" in "".join(unused)) == (not kind)


def test_a_block_of_its_own_drafts_without_being_asked(model: Path, plain: Path, tmp_path: Path) -> None:
    given = ("-md", str(model))
    assert "spec" not in words(resolved(plain, *given, draft_file=model))
    with pytest.raises(UsageError, match="drafts of 3 tokens are verified 4"):
        resolved(plain, *given, draft_file=model, expert_slots=128, expert_batch=3)
    lame = with_block(tmp_path / "lame.gguf", "exaone-moe")
    with pytest.raises(ModelError, match="no graph for the MTP block of exaone-moe"):
        resolved(plain, "-md", str(lame), draft_file=lame)


def test_variables_of_the_server_count(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_SPEC_TYPE", "draft-dflesh")
    with pytest.raises(UsageError, match="draft-dflesh"):
        resolved(model)
    monkeypatch.setenv("LLAMA_ARG_SPEC_TYPE", "draft-simple")
    with pytest.raises(UsageError, match="needs a draft model"):
        resolved(model)
    monkeypatch.setenv("LLAMA_ARG_SPEC_DRAFT_MODEL", str(model))
    settings = resolved(model, draft_file=model)
    assert settings.upstream == ("--spec-type", "draft-simple", "-md", str(model))
    assert not [name for name in child_environment(settings) if "SPEC" in name]


def test_types_add_up(model: Path) -> None:
    twice = ("--spec-type", "draft-mtp", "--spec_type", "ngram-mod")
    assert "n-max 2" in words(resolved(model, *twice, mtp=2))
    assert "n-max 7" in words(resolved(model, *twice, mtp="auto"))
    with pytest.raises(UsageError, match="needs a draft model"):
        resolved(model, "--spec-type", "draft-simple", "--spec-type", "ngram-mod")
    assert "n-max" not in words(resolved(model, "--spec-type", "none", "--spec-type", "ngram-mod", mtp="auto"))
    assert "n-max" not in words(resolved(model, "--spec-type", "draft-mtp,none", mtp="auto"))


@pytest.mark.parametrize("architecture", ["glm5-next", "glm4", "exaone-moe", "bailingmoe2", "dots3note"])
def test_blocks_that_the_engine_cannot_draft_with(tmp_path: Path, architecture: str) -> None:
    target = with_block(tmp_path / "block.gguf", architecture)
    settings = resolved(target, mtp="auto")
    assert "spec" not in words(settings) and settings.draft == "off"
    assert [note for note in notes(settings, check_model(target)) if f"block of {architecture}" in note]
    for flags in ({"mtp": 3}, {"spec": "draft-mtp"}):
        with pytest.raises(ModelError, match=f"no graph for the MTP block of {architecture}"):
            resolved(target, **flags)


def test_more_blocks_than_the_graph_takes(tmp_path: Path) -> None:
    target = with_block(tmp_path / "two.gguf", nextn_predict_layers=2)
    assert "spec" not in words(resolved(target, mtp="auto"))
    with pytest.raises(ModelError, match="has 2"):
        resolved(target, mtp=3)
    resolved(with_block(tmp_path / "step.gguf", "step35", nextn_predict_layers=2), mtp=3)


def test_a_block_without_its_weights(tmp_path: Path, model: Path, plain: Path) -> None:
    trunk = with_block(tmp_path / "trunk.gguf", tensors=TRUNK)
    with pytest.raises(ModelError, match="no MTP block"):
        resolved(trunk, mtp=3)
    with pytest.raises(ModelError, match=r"plain.gguf has no MTP block") as caught:
        resolved(model, "-md", str(plain), draft_file=plain, mtp=3)
    assert "without -md" in caught.value.fix
    resolved(trunk, "-md", str(model), draft_file=model, mtp=3)
    assistant = with_block(tmp_path / "assistant.gguf", ASSISTANT, (*TRUNK, "blk.0.nextn.pre_projection.weight"))
    assert "n-max 7" in words(resolved(plain, "-md", str(assistant), draft_file=assistant, mtp="auto"))


def test_one_draft_context(model: Path, plain: Path) -> None:
    given = ("-md", str(model))
    with pytest.raises(UsageError, match="draft-simple and draft-mtp do not go together"):
        resolved(plain, *given, draft_file=model, spec="draft-simple", mtp=3)
    with pytest.raises(UsageError, match="draft-dflash and draft-dspark"):
        draft = of_layers(plain.with_name("dflash.gguf"))
        resolved(plain, "-md", str(draft), draft_file=draft, spec="draft-dflash,draft-dspark")
    assert "n-max" not in words(resolved(plain, *given, draft_file=model, spec="draft-simple", mtp="auto"))
    assert "draft-mtp,ngram-mod" in words(resolved(model, spec="draft-mtp,ngram-mod"))


def test_drafts_of_another_width(tmp_path: Path) -> None:
    def width(name: str, architecture: str = "qwen35moe", **keys: object) -> Path:
        return with_block(tmp_path / f"{name}.gguf", architecture, **keys)

    target = width("target", embedding_length=64)
    for draft in (width("narrow", embedding_length=32), width("out", embedding_length=64, embedding_length_out=32)):
        with pytest.raises(ModelError, match=r"rows of 32, and those of .* are 64"):
            resolved(target, "-md", str(draft), draft_file=draft, mtp=3)
    fits = width("fits", embedding_length=32, embedding_length_out=64)
    resolved(target, "-md", str(fits), draft_file=fits, mtp=3)
    wide = width("wide", "qwen4exp", embedding_length=32, **{"hyper_connection.count": 2})
    resolved(target, "-md", str(wide), draft_file=wide, mtp=3)
    for architecture, key in (("dflash", "embedding_length"), ("eagle3", "target_hidden_size")):
        draft = of_layers(tmp_path / f"{architecture}.gguf", architecture, **{key: 32})
        with pytest.raises(ModelError, match="rows of 32"):
            resolved(target, "-md", str(draft), draft_file=draft, spec=f"draft-{architecture}")


def test_a_device_for_a_draft_that_is_a_part_of_the_model(model: Path, plain: Path) -> None:
    for mtp in ("auto", 3):
        with pytest.raises(UsageError, match="--draft-device CUDA1 has no effect") as caught:
            resolved(model, mtp=mtp, draft_device="CUDA1")
        assert "-md" in caught.value.fix
    settings = resolved(plain, draft_device="CUDA1")
    assert "CUDA1 has no effect" in notes(settings, check_model(plain))[0]
    settings = resolved(plain, "-md", str(model), draft_file=model, mtp=3, draft_device="CUDA1")
    assert notes(settings, check_model(plain), check_model(model, draft=True)) == []


@pytest.mark.parametrize(
    ("upstream", "flags", "says"),
    [
        ((), {"mtp": 3}, "up to 16 tokens are verified at once (drafts of 3, 4 sequences), and slots serve 8"),
        ((), {"mtp": 3}, "LLAMA_PHASE_DRAFT=auto (or --mtp auto), or serve 2 at a time (-np 2), or draft at most 1"),
        (("-np", "2"), {"mtp": 3}, ""),
        (("-np", "3"), {"mtp": 3}, "up to 12 tokens"),
        (("-np", "2", "--spec-draft-n-max", "5"), {"mtp": 3}, "up to 12 tokens"),
        ((), {"mtp": 3, "draft": "auto"}, ""),
        ((), {"mtp": "auto"}, ""),
        ((), {"mtp": 3, "expert_slots": 0}, ""),
        ((), {"mtp": 3, "expert_batch": 16}, ""),
        (("-np", "1"), {"spec": "ngram-mod"}, "up to 65 tokens"),
        (("-np", "1", "--spec-ngram-mod-n-max", "7"), {"spec": "ngram-mod"}, ""),
        (("-np", "1", "--spec-default"), {}, "up to 65 tokens"),
        (("-np", "1"), {"spec": "ngram-simple"}, "up to 49 tokens"),
        ((), {"spec": "none"}, ""),
    ],
)
def test_batches_that_slots_do_not_serve_are_said(
    model: Path, upstream: tuple[str, ...], flags: dict, says: str
) -> None:
    settings = resolved(model, *upstream, **({"expert_slots": 128} | flags))
    found = notes(settings, check_model(model))
    assert says in found[0] if says else found == []


def sources_of_models() -> tuple[dict[str, str], dict[str, tuple[str, str]], dict[tuple[str, str], str]]:
    """Of the pinned source: architecture -> class, class -> (base, declaration), (class, member) -> its definition."""
    source = next((ROOT / name / "src" for name in ("build/src", "llama.cpp") if (ROOT / name / "src").exists()), None)
    if source is None:
        pytest.skip("no source, run make source")
    names = dict(re.findall(r'{ *(LLM_ARCH_\w+), *"([^"]+)"', (source / "llama-arch.cpp").read_text()))
    made = re.findall(
        r"case (LLM_ARCH_\w+):\s+return new (llama_model_\w+)\(", (source / "llama-model.cpp").read_text()
    )
    declared = {}
    for part in re.split(r"^(?=struct llama_model_)", (source / "models/models.h").read_text(), flags=re.M)[1:]:
        if match := re.match(r"struct (llama_model_\w+) : public (llama_model_\w+)", part):
            declared[match[1]] = (match[2], part)
    defined: dict[tuple[str, str], str] = {}
    for path in sorted((source / "models").glob("*.cpp")):
        for part in re.split(r"^(?=(?:[^\s/#}][^(\n]*\b)?llama_model_\w+::)", path.read_text(), flags=re.M)[1:]:
            if match := re.match(r".*?(llama_model_\w+)::(\w+)", part):
                defined[match[1], match[2]] = defined.get((match[1], match[2]), "") + part
    return {names[key]: cls for key, cls in made}, declared, defined


def test_architectures_are_those_of_the_pinned_source() -> None:
    classes, declared, defined = sources_of_models()

    def owner(cls: str, member: str, own: str) -> str:
        """The class whose `member` this one uses: its own, one that it names, or its base's."""
        while cls in declared:
            base, text = declared[cls]
            if other := re.search(rf"using {member} = (llama_model_\w+)::", text):
                cls = other[1]
            elif re.search(own, text):
                return cls
            else:
                cls = base
        return cls

    inputs, graphs, one_block = set(), set(), set()
    for architecture, cls in classes.items():
        graph = defined.get((owner(cls, "graph", r"struct graph\b"), "graph"), "")
        given = set(re.findall(r"t_layer_inp\[il\] = (\w+)", graph))
        assert given <= {"inpL", "cur", "build_hc_mean", "res_hc"}, f"{architecture} gives {given} now"
        if given and given != {"res_hc"}:  # of all hyper-connections, wider than the model
            inputs.add(architecture)
        builder = owner(cls, "build_arch_graph", "build_arch_graph")
        if "DECODER_MTP" in (build := defined.get((builder, "build_arch_graph"), "")) and "<graph_mtp>" in build:
            graphs.add(architecture)
            if "n_layer_nextn == 1" in defined[builder, "graph_mtp"]:
                one_block.add(architecture)
    assert inputs == set(LAYER_INPUTS) and len(LAYER_INPUTS) == len(inputs)
    assert graphs | {ASSISTANT} == set(MTP_GRAPHS) and one_block == set(MTP_OF_ONE_BLOCK)
    widened = {
        name
        for name, cls in classes.items()
        if "n_embd_out_impl = hparams.dsv4_hc_mult" in defined.get((cls, "load_arch_hparams"), "")
    }
    assert widened == set(WIDENED)


def test_lists_are_those_of_the_pinned_source() -> None:
    source = ROOT / "llama.cpp"
    if not source.exists():
        pytest.skip("no source, run make source")
    text = (source / "common/speculative.cpp").read_text()
    table = text.split("common_speculative_type_from_name_map = {")[1]
    assert set(TYPES) == set(re.findall(r'{"([a-z0-9-]+)",', table.split("};")[0]))
    inferred = text.split("common_speculative_types_from_gguf(const std::string & path) {")[1].split("\n}\n")[0]
    assert set(re.findall(r"TYPE_(DRAFT_\w+)", inferred)) == {"DRAFT_MTP", "DRAFT_DSPARK", "DRAFT_DFLASH"}
    common = (source / "common/common.h").read_text()
    assert f"int32_t n_max = {UPSTREAM_N_MAX}; // maximum number of tokens to draft" in common
    assert "size_m   = 48;" in common
    arguments = (source / "common/arg.cpp").read_text()
    assert all(f'{{"{flag}"}}' in arguments for flag, _ in NGRAM_LENGTHS.values() if flag)
    assert re.search(r"struct common_params_speculative_ngram_mod {[^}]*n_max = 64;", common)
