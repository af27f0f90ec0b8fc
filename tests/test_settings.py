"""Settings: precedence, sources, and refusals that name what clashes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from llama_phase.env import parse_bool, registry
from llama_phase.errors import UsageError
from llama_phase.settings import Settings, argv

MODEL = Path("m.gguf")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(("LLAMA_", "GGML_")):
            monkeypatch.delenv(name)


def load(**flags: object) -> Settings:
    return Settings.load(**{"model": MODEL, **flags})


def pairs(settings: Settings) -> dict[str, str]:
    words = argv(settings)
    return {word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("-")}


def refusal(**flags: object) -> str:
    with pytest.raises(UsageError) as caught:
        load(**flags)
    assert caught.value.fix and caught.value.exit_code == 2
    return f"{caught.value} | {caught.value.fix}"


def test_every_setting_has_its_variable() -> None:
    for name in set(Settings.model_fields) - {"upstream"}:
        assert "LLAMA_PHASE_" + name.upper() in registry(), name


def test_defaults_of_settings_and_registry_agree() -> None:
    for variable in registry().values():
        field = Settings.model_fields.get(variable.field)
        if field is None or field.is_required() or variable.field == "prefill_mode":
            continue
        if variable.kind == "bool":
            assert parse_bool(variable.default) is field.default, variable.name
            continue
        assert variable.default == ("" if field.default is None else str(field.default)), variable.name


def test_limits_of_settings_and_registry_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in registry().values():
        if variable.kind not in ("int", "int_or_auto") or variable.field not in Settings.model_fields:
            continue
        with monkeypatch.context() as patch:
            for name, value in (("LLAMA_PHASE_PREFILL_MODE", "off"), (variable.name, str(variable.max))):
                patch.setenv(name, value)
            assert getattr(load(), variable.field) == variable.max


def test_flag_beats_environment_beats_upstream_variable_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (load().port, load().source("port")) == (8080, "default")
    monkeypatch.setenv("LLAMA_ARG_PORT", "1001")
    assert (load().port, load().source("port")) == (1001, "environment LLAMA_ARG_PORT")
    monkeypatch.setenv("LLAMA_PHASE_PORT", "1002")
    assert (load().port, load().source("port")) == (1002, "environment LLAMA_PHASE_PORT")
    given = load(upstream=["--port", "1003"])
    assert (given.port, given.source("port")) == (1003, "upstream flag --port")
    assert (load(port=1004).port, load(port=1004).source("port")) == (1004, "flag")


def test_l10_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LLAMA_PHASE_PORT", "LLAMA_PHASE_PREFILL_MODE", "LLAMA_PHASE_API_KEY", "LLAMA_ARG_UBATCH"):
        monkeypatch.setenv(name, "")
    settings = load()
    assert (settings.port, settings.prefill_mode, settings.api_key, settings.ubatch) == (8080, "transaction", None, 512)


def test_l9_an_unknown_name_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "`prefill_ubatch`" in refusal(prefil_ubatch=4096)
    monkeypatch.setenv("LLAMA_PHASE_PREFILL_UBTACH", "4096")
    text = refusal()
    assert "LLAMA_PHASE_PREFILL_UBTACH" in text and "LLAMA_PHASE_PREFILL_UBATCH" in text and "1 to 65536" in text


def test_a_wrong_value_names_setting_and_source() -> None:
    assert "port" in refusal(port=70000) and "flag" in refusal(port=70000)
    assert "prefill_mode" in refusal(prefill_mode="on")
    assert "ubatch (upstream flag -ub)" in refusal(upstream=["-ub", "many"])
    assert "model is not given" in refusal(model=None)


def test_it_is_frozen() -> None:
    with pytest.raises(ValidationError):
        load().port = 1


def test_logical_batch_holds_a_prefill_micro_batch() -> None:
    assert pairs(load())["-b"] == "2048"
    assert pairs(load(prefill_ubatch=4096))["-b"] == "4096"
    assert pairs(load(prefill_ubatch=512))["-b"] == "2048"
    assert pairs(load(prefill_ubatch="auto"))["-b"] == "8192"
    assert pairs(load(prefill_ubatch="auto", batch=1024))["-b"] == "1024", "a limit, not a mistake"
    assert pairs(load(batch=8192))["-b"] == "8192"
    assert "-b" not in pairs(load(prefill_mode="off"))
    assert pairs(load(prefill_mode="off", batch=64))["-b"] == "64"


@pytest.mark.parametrize("upstream", [["-b", "512"], ["--batch-size", "512"], ["--batch_size", "512"]])
def test_a_smaller_logical_batch_is_refused_naming_both(upstream: list[str]) -> None:
    text = refusal(upstream=upstream)
    assert "batch 512" in text and "prefill_ubatch 2048" in text


def test_upstream_flags_that_are_settings_are_understood_not_repeated() -> None:
    settings = load(upstream=["-ngl", "99", "-ub", "256", "-c", "4096", "--host", "0.0.0.0", "--port", "9", "-t", "4"])
    words = argv(settings)
    assert (settings.ubatch, settings.ctx, settings.base_url) == (256, 4096, "http://127.0.0.1:9")
    for flag in ("-ub", "-c", "--host", "--port", "-m"):
        assert words.count(flag) == 1, flag
    assert words[-4:] == ["-ngl", "99", "-t", "4"]


def test_clashing_flags_are_refused() -> None:
    assert load(port=9, upstream=["--port", "9"]).port == 9
    text = refusal(port=9, upstream=["--port", "10"])
    assert "9" in text and "--port 10" in text
    assert "m.gguf" in refusal(upstream=["--model", "other.gguf"])
    assert "twice" in refusal(upstream=["-b", "4096", "--batch-size", "8192"])
    assert "no value" in refusal(upstream=["--port"])
    assert "write `--port 9`" in refusal(upstream=["--port=9"])
    assert "-hf" in refusal(upstream=["-hf", "some/model"])


def test_metrics_are_always_on() -> None:
    assert argv(load()).count("--metrics") == 1
    assert argv(load(upstream=["--metrics"])).count("--metrics") == 1


@pytest.mark.parametrize("upstream", [["--api-key", "s3cret"], ["--api-key=s3cret"], ["--api_key", "s3cret"]])
def test_an_api_key_in_argv_is_refused_without_repeating_it(upstream: list[str]) -> None:
    text = refusal(upstream=upstream)
    assert "s3cret" not in text and "LLAMA_PHASE_API_KEY" in text


def test_an_api_key_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLAMA_PHASE_API_KEY", "s3cret,other")
    settings = load()
    assert settings.probe_key == "s3cret"
    assert "s3cret" not in repr(settings) + str(settings) + " ".join(argv(settings)) + settings.model_dump_json()
    monkeypatch.delenv("LLAMA_PHASE_API_KEY")
    file = tmp_path / "key"
    file.write_text("# mine\nfrom-file\n")
    assert load(upstream=["--api-key-file", str(file)]).probe_key == "from-file"
    file.write_text("# nothing\n")
    with pytest.raises(UsageError, match="no key"):
        _ = load(upstream=["--api-key-file", str(file)]).probe_key


def test_url_of_the_server_as_seen_from_here() -> None:
    assert load(host="::1").base_url == "http://[::1]:8080"
    assert load(host="/run/x.sock,0.0.0.0").base_url == "http://127.0.0.1:8080"
    assert load(upstream=["--api-prefix", "/llm", "--ssl-cert-file", "c", "--ssl-key-file", "k"]).base_url == (
        "https://127.0.0.1:8080/llm"
    )
    assert ".sock" in refusal(host="/run/x.sock")
