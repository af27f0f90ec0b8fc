"""Configuration files: where they are found, what hides what, refusals that name file and key, `config show`."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from llama_phase.cli import app
from llama_phase.cli_config import describe
from llama_phase.config_file import FILE_NAME, config_files
from llama_phase.env import child_environment
from llama_phase.errors import UsageError
from llama_phase.settings import Settings, argv


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("LLAMA_", "GGML_")):
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / FILE_NAME
    path.write_text(text)
    path.chmod(0o600)
    return path


def load(*files: Path, **flags: object) -> Settings:
    return Settings.load(files=files, **({"model": "m.gguf"} | flags))


def refusal(*files: Path, **flags: object) -> str:
    with pytest.raises(UsageError) as caught:
        load(*files, **flags)
    assert caught.value.fix and caught.value.exit_code == 2
    return f"{caught.value} | {caught.value.fix}"


def test_the_projects_file_comes_before_the_users(tmp_path: Path) -> None:
    project, user = tmp_path / "project", tmp_path / "user"
    assert config_files({}, project=project, user=user) == []
    theirs = write(user, "port = 1\nctx = 4096\n")
    ours = write(project, "port = 2\n")
    assert config_files({}, project=project, user=user) == [ours, theirs]
    settings = load(ours, theirs)
    assert (settings.port, settings.source("port")) == (2, f"file {ours}")
    assert (settings.ctx, settings.source("ctx")) == (4096, f"file {theirs}")
    assert config_files({}, project=user, user=user) == [theirs]


def test_a_variable_names_the_only_file_or_none(tmp_path: Path) -> None:
    theirs, own = write(tmp_path / "user", "port = 1\n"), write(tmp_path / "own", "port = 3\n")
    for value, expected in (("off", []), (str(own), [own]), ("", [theirs])):
        found = config_files({"LLAMA_PHASE_CONFIG": value}, project=tmp_path, user=theirs.parent)
        assert found == expected, value
    with pytest.raises(UsageError, match="LLAMA_PHASE_CONFIG"):
        config_files({"LLAMA_PHASE_CONFIG": str(tmp_path / "gone.toml")})


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "port = 1001\n")
    assert load(file).port == 1001
    monkeypatch.setenv("LLAMA_ARG_PORT", "1002")
    assert load(file).source("port") == "environment LLAMA_ARG_PORT"
    monkeypatch.setenv("LLAMA_PHASE_PORT", "1003")
    assert load(file).port == 1003
    assert load(file, upstream=["--port", "1004"]).port == 1004
    assert load(file, port=1005).port == 1005


def test_without_files_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "port = 1\n")
    monkeypatch.chdir(tmp_path)
    assert load().port == 8080


def test_values_are_read_as_a_variable_would_be(tmp_path: Path) -> None:
    text = 'port = "9"\nexpert_slots = "auto"\nkeep_conversations = true\nbudget_mib = [1, 2]\nlog = ""\nring = 2\n'
    settings = load(write(tmp_path, text))
    assert (settings.port, settings.expert_slots, settings.keep_conversations) == (9, "auto", True)
    assert (settings.budget_mib, settings.log, settings.source("log"), settings.ring) == ("1,2", "info", "default", 2)


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "models", 'model = "a.gguf"\nstate_dir = "~/s"\n')
    settings = Settings.load(files=[file])
    assert settings.model == tmp_path / "models" / "a.gguf"
    assert settings.state_path == Path.home() / "s"


def test_flags_of_the_server_in_a_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'upstream = ["-ngl", 99, "-ub", "256"]\n')
    settings = load(file, upstream=["-ngl", "50"])
    assert (settings.ubatch, settings.source("ubatch")) == (256, f"file {file} (-ub)")
    assert argv(settings)[-4:] == ["-ngl", "99", "-ngl", "50"]  # the last one counts
    assert load(file, ubatch=128).ubatch == 128
    assert "twice" in refusal(write(tmp_path, 'ubatch = 128\nupstream = ["-ub", "256"]\n'))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1\n", "`prot` `port`"),
        ("[port]\n", "`port` no text"),
        ("[server]\nport = 1\n", "table `server`"),
        ("port = 1.5\n", "`port` '1.5' 0 to 65535"),
        ("port = true\n", "`port` 0 to 65535"),
        ('keep_conversations = "yes"\n', "`keep_conversations` on/off"),
        ('prefill_mode = "on"\n', "`prefill_mode` transaction"),
        ("port = \n", "TOML"),
        ('upstream = "-ngl 99"\n', "`upstream` list"),
        ("budget_mib = [1, true]\n", "`budget_mib`"),
        ("sdist = 'x'\n", "`sdist`"),
        pytest.param(f"port = {'9' * 5000}\n", "number", id="long number"),
        pytest.param(f"port = 0x{'f' * 5000}\n", "`port`", id="long hexadecimal number"),
        pytest.param(f"budget_mib = [0x{'f' * 5000}]\n", "`budget_mib`", id="long number in a list"),
        pytest.param(f"port = {'[' * 5000}\n", "deep", id="deep list"),
        pytest.param(f"port = '{'9' * 5000}'\n", "`port` 0 to 65535", id="long text"),
    ],
)
def test_l9_what_is_wrong_is_refused_with_file_key_and_what_is_right(tmp_path: Path, text: str, words: str) -> None:
    file = write(tmp_path, text)
    said = refusal(file)
    assert str(file) in said and "LLAMA_PHASE_CONFIG=off" in said and len(said) < 500
    for word in words.split(" "):
        assert word in said, (word, said)


@pytest.mark.parametrize("text", ['host = "a b"', "batch = 64", 'api_key = "ü"', "ctx = 1", "model = '~nouser/x'"])
def test_every_refusal_for_a_file_says_how_to_do_without_it(tmp_path: Path, text: str) -> None:
    # `down` and `status` read the settings too, and must remain possible
    said = refusal(write(tmp_path, f"{text}\n" + ("upstream = ['-c', '2']\n" if "ctx" in text else "")))
    assert str(tmp_path) in said and "LLAMA_PHASE_CONFIG=off" in said


def test_a_file_that_cannot_be_read_is_an_error_and_not_skipped(tmp_path: Path) -> None:
    file = tmp_path / FILE_NAME
    file.write_bytes(b"\xff\xfe")
    assert str(file) in refusal(file)
    assert "off" in refusal(tmp_path)


def test_a_folder_that_may_not_be_searched_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", denied)  # root may search every folder
        with pytest.raises(UsageError, match=f"{tmp_path}.*Permission denied"):
            config_files({}, project=tmp_path, user=tmp_path)
    for named in (str(tmp_path / ("x" * 300)), "~nouser/x"):
        with pytest.raises(UsageError):
            config_files({"LLAMA_PHASE_CONFIG": named})


def test_a_current_folder_that_is_gone_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    user = write(tmp_path, "port = 1\n")
    assert config_files({}, user=user.parent) == [user]


def test_an_api_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, 'api_key = "s3cret"\n')
    assert load(file).probe_key == "s3cret"
    file.chmod(0o644)
    said = refusal(file)
    assert "chmod 600" in said and "s3cret" not in said


def test_logical_batch_and_its_source_are_named_when_they_come_from_a_file(tmp_path: Path) -> None:
    file = write(tmp_path, "batch = 512\n")
    assert f"batch 512 (file {file})" in refusal(file)


def test_settings_reach_the_engine(tmp_path: Path) -> None:
    settings = load(write(tmp_path, 'prefill_ubatch = 4096\nrestore = "prompt"\n'))
    child = child_environment(settings, {})
    assert (child["LLAMA_PHASE_PREFILL_UBATCH"], child["LLAMA_PHASE_RESTORE"]) == ("4096", "prompt")


def test_show_hides_secrets_and_says_what_the_server_does_not_get() -> None:
    base = {"GGML_CUDA_P2P": "0", "LLAMA_TRACE": "", "HF_TOKEN": "s3cret", "LLAMA_ARG_PORT": "7", "PATH": "/bin"}
    facts = describe(load(api_key="s3cret"), [], base)
    assert "s3cret" not in json.dumps(facts)
    assert facts["environment"]["HF_TOKEN"] == facts["environment"]["LLAMA_API_KEY"] == "(set)"
    assert set(facts["left_out"]) == {"GGML_CUDA_P2P", "LLAMA_TRACE", "LLAMA_ARG_PORT"}
    assert facts["settings"]["api_key"] == {"value": "(set)", "source": "flag"}


def show(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llama_phase.cli", "config", "show", *words]
    base = os.environ | {"XDG_CONFIG_HOME": str(cwd / "none")}
    return subprocess.run(command, env=base, cwd=cwd, capture_output=True, text=True, check=False)


def test_config_show_takes_every_option_of_serve() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shown = {word for parameter in commands["config"].commands["show"].params for word in parameter.opts}
    assert {word for parameter in commands["serve"].params for word in parameter.opts} <= shown


def test_config_show_names_a_flag_as_the_source(tmp_path: Path) -> None:
    words = ["m.gguf", "--slots", "4", "--grace", "7", "--no-rollback", "--mtp", "--json", "--", "-ub", "256"]
    done = show(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    values = {"expert_slots": 4, "grace_s": 7, "rollback": False, "mtp": "auto", "model": "m.gguf"}
    assert all(facts["settings"][name] == {"value": value, "source": "flag"} for name, value in values.items())
    assert facts["settings"]["ubatch"] == {"value": 256, "source": "upstream flag -ub"}
    assert facts["argv"][:2] == ["-m", "m.gguf"]


def test_config_show_without_a_model_says_so(tmp_path: Path) -> None:
    assert "-m" not in json.loads(show("--json", "--", "-ub", "256", cwd=tmp_path).stdout)["argv"]
    text = show(cwd=tmp_path).stdout
    assert "no model is given" in text and "-m ." not in text


@pytest.mark.parametrize("as_json", [False, True])
def test_config_show_command(tmp_path: Path, as_json: bool) -> None:
    file = write(tmp_path, "port = 81\n")
    command = [sys.executable, "-m", "llama_phase.cli", "config", "show", *(["--json"] if as_json else [])]
    environment = os.environ | {
        "XDG_CONFIG_HOME": str(tmp_path / "none"),
        "LLAMA_PHASE_CTX": "4096",
        "GGML_CUDA_P2P": "0",
    }
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if as_json:
        facts = json.loads(done.stdout)
        assert facts["settings"]["port"] == {"value": 81, "source": f"file {file}"}
        assert facts["settings"]["model"]["source"] == "not given"
        assert (
            facts["environment"] == {"LLAMA_PHASE_PREFILL_MODE": "transaction"} and "GGML_CUDA_P2P" in facts["left_out"]
        )
    else:
        assert f"(file {file})" in done.stdout and "(environment LLAMA_PHASE_CTX)" in done.stdout
