"""Settings: precedence, sources, and refusals that name what clashes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from llama_phase.address import read_api_key
from llama_phase.client import Client
from llama_phase.engine_settings import load_settings
from llama_phase.env import FLAG_NAMES, child_environment, parse_bool, registry
from llama_phase.errors import UsageError
from llama_phase.generation import check_keywords
from llama_phase.settings import Settings, argv
from llama_phase.upstream_flags import FLAG_ENVIRONMENT

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


@pytest.mark.parametrize("words", [["-nkvo"], ["--kv-offload", "--no_kv_offload"], ["-np", "1", "-nkvo", "-fa", "on"]])
@pytest.mark.parametrize("kv", ["host", "auto", "host-all"])
def test_no_kv_offload_beside_kv_in_host_memory_is_refused(words: list[str], kv: str) -> None:
    """llama.cpp takes K/V to the CPU then, before the engine is asked where it goes."""
    said = refusal(kv=kv, upstream=words)
    assert f"kv {kv} (flag)" in said and "upstream flags" in said and "LLAMA_PHASE_KV=device" in said
    assert load(upstream=words).kv == "device" and load(kv=kv, upstream=[*words, "-kvo"]).kv == kv


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("LLAMA_ARG_KV_OFFLOAD", "off", True),
        ("LLAMA_ARG_KV_OFFLOAD", "1", False),
        ("LLAMA_ARG_NO_KV_OFFLOAD", "1", True),
    ],
)
def test_so_is_its_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str, refused: bool) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("LLAMA_PHASE_KV", "host")
    assert load(upstream=["-kvo"]).kv == "host", "a flag counts more"
    if not refused:
        assert load().kv == "host"
        return
    assert f"{name} (environment)" in (said := refusal()) and "kv host (environment LLAMA_PHASE_KV)" in said


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


def test_a_default_of_serve_that_is_not_the_engines_is_said() -> None:
    for variable in registry().values():
        default = getattr(Settings.model_fields.get(variable.field), "default", None)
        if variable.scope == "engine" and default is not None and str(default) != variable.default:
            said = variable.meaning.partition("Unset: ")[2]
            for word in (f"`{variable.default}` for the engine", "`llama-phase serve`", f"set `{default}`"):
                assert word in said, variable.name


def test_limits_of_settings_and_registry_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in registry().values():
        if variable.kind not in ("int", "int_or_auto") or variable.field not in Settings.model_fields:
            continue
        with monkeypatch.context() as patch:
            for name, value in (("LLAMA_PHASE_PREFILL_MODE", "off"), (variable.name, str(variable.max))):
                patch.setenv(name, value)
            assert getattr(load(), variable.field) == variable.max


def test_a_number_out_of_range_is_refused_by_every_way_and_the_range_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in registry().values():
        if variable.kind not in ("int", "int_or_auto") or variable.field not in Settings.model_fields:
            continue
        for value in (variable.min - 1, variable.max + 1, 10**5000, "many", "9" * 5000):
            said = refusal(**{variable.field: value})
            assert variable.field in said and variable.accepted in said and len(said) < 300, said
        with monkeypatch.context() as patch:
            patch.setenv(variable.name, "9" * 5000)
            said = refusal()
            assert variable.name in said and variable.accepted in said and len(said) < 300, said


@pytest.mark.parametrize(("name", "flag"), [("expert_slots", "--slots"), ("grace_s", "--grace"), ("mtp", "--mtp")])
def test_a_flag_is_called_as_the_user_knows_it(name: str, flag: str) -> None:
    assert f"(flag {flag})" in refusal(**{name: -3})


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


@pytest.mark.parametrize(("flag", "setting"), list(FLAG_NAMES.items()))
def test_the_nearest_of_a_flags_name_is_its_setting(
    flag: str, setting: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert f"`{setting}`" in refusal(**{flag: 3})
    file = tmp_path / "llama-phase.toml"
    file.write_text(f"{flag} = 3\n")
    assert f"`{setting}`" in refusal(files=[file])
    with pytest.raises(TypeError, match=f"'{setting}'"):
        check_keywords([flag], [setting, "draft_slots", "trace"])
    monkeypatch.setenv(f"LLAMA_PHASE_{flag.upper()}", "3")
    assert f"nearest is LLAMA_PHASE_{setting.upper()} " in refusal()


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


@pytest.mark.parametrize("key", ["schlüssel", "a\nb", " k7y", "a\udcff"])
def test_an_api_key_that_no_header_can_hold_is_refused_without_repeating_it(key: str, tmp_path: Path) -> None:
    for said in (refusal(api_key=key), refusal(api_key=f"{key},other")):
        assert "api_key" in said and key not in said
    with pytest.raises(UsageError):
        Client("http://127.0.0.1:1", api_key="schlüssel")


def test_the_key_file_is_held_to_the_same(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# keys\nschlüssel\n")
    with pytest.raises(UsageError, match="keys"):
        read_api_key(tmp_path / "keys")


@pytest.mark.parametrize(
    ("given", "host", "url"),
    [
        ("[::1]", "::1", "http://[::1]:8080"),
        ("127.0.0.1, 127.0.0.1", "127.0.0.1", "http://127.0.0.1:8080"),
        ("::1,[::1],localhost", "::1,localhost", "http://[::1]:8080"),
        ("fe80::1%eth0", "fe80::1%eth0", "http://[fe80::1%eth0]:8080"),
    ],
)
def test_an_address_is_taken_as_it_is_written_elsewhere_and_once(given: str, host: str, url: str) -> None:
    settings = load(host=given)
    assert (settings.host, settings.base_url) == (host, url)
    Client(settings.base_url).close()


@pytest.mark.parametrize("host", ["[", "::1]", "http://x", "a b", "a/b", "x:80", "müll", "a@b", "[x]:1", "1::2::3"])
def test_what_is_no_address_is_refused_before_a_url_is_made_of_it(host: str) -> None:
    assert repr(host) in refusal(host=host)


def test_one_port_is_not_for_server_and_metrics() -> None:
    assert "--metrics-port" in refusal(port=9090, metrics_port=9090)
    assert load(port=0, metrics_port=0).metrics_port == 0


@pytest.mark.parametrize("name", ["model", "state_dir", "server_binary"])
def test_home_folders(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert getattr(load(**{name: "~/x"}), name) == tmp_path / "x"
    assert name in refusal(**{name: "~nouser/x"})
    with monkeypatch.context() as patch:
        patch.setenv(f"LLAMA_PHASE_{name.upper()}", "~nouser/x")
        assert name in refusal(model=None if name == "model" else MODEL)
    file = tmp_path / "llama-phase.toml"
    file.write_text(f'{name} = "~nouser/x"\n')
    assert f"`{name}`" in refusal(files=[file])


@pytest.mark.parametrize(("variable", "names"), list(FLAG_ENVIRONMENT.items()))
def test_a_variable_of_the_server_is_what_its_flag_is(
    variable: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("k1\n")
    as_flag = load(upstream=[names[0], str(key)])
    monkeypatch.setenv(variable, str(key))
    as_variable = load()
    for settings in (as_flag, as_variable):
        assert argv(settings)[-2:] == [names[0], str(key)]
    assert (as_variable.base_url, as_variable.probe_key) == (as_flag.base_url, as_flag.probe_key)
    assert variable in as_variable.source("upstream") and variable not in child_environment(as_variable)
    assert argv(load(upstream=[names[0], "mine"])).count(names[0]) == 1, "the flag counts"
    assert load_settings(MODEL, None, {})[1].upstream == (), "an engine in this process is no server"


def test_url_of_the_server_as_seen_from_here() -> None:
    assert load(host="::1").base_url == "http://[::1]:8080"
    assert load(host="/run/x.sock,0.0.0.0").base_url == "http://127.0.0.1:8080"
    assert load(upstream=["--api-prefix", "/llm", "--ssl-cert-file", "c", "--ssl-key-file", "k"]).base_url == (
        "https://127.0.0.1:8080/llm"
    )
    assert ".sock" in refusal(host="/run/x.sock")
