"""The child's environment is built, never inherited blindly; names and values are checked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llama_phase.env import PRESENCE_MEANS_ON, child_environment, describe, parse_bool, registry, scan
from llama_phase.errors import UsageError
from llama_phase.settings import UPSTREAM_ENVIRONMENT, Settings

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("LLAMA_", "GGML_")):
            monkeypatch.delenv(name)


def load(**flags: object) -> Settings:
    return Settings.load(model=Path("m.gguf"), **flags)


def child(base: dict[str, str], **flags: object) -> dict[str, str]:
    return child_environment(load(**flags), base)


def test_engine_variables_come_from_settings_and_only_where_they_differ() -> None:
    assert child({}) == {"LLAMA_PHASE_PREFILL_MODE": "transaction"}
    assert child({}, prefill_ubatch=4096, prefill_min_tokens=100) == {
        "LLAMA_PHASE_PREFILL_MODE": "transaction",
        "LLAMA_PHASE_PREFILL_UBATCH": "4096",
        "LLAMA_PHASE_PREFILL_MIN_TOKENS": "100",
    }


def test_mode_off_and_nothing_else_leaves_the_engine_stock() -> None:
    assert child({"PATH": "/bin"}, prefill_mode="off") == {"PATH": "/bin"}


def test_engine_variables_without_a_flag_are_passed_on() -> None:
    others = {v.name: v for v in registry().values() if v.scope == "engine" and v.field not in Settings.model_fields}
    values = {name: variable.choices[-1] if variable.choices else "1" for name, variable in others.items()}
    assert child(values, prefill_mode="off") == values
    assert child({name: variable.default for name, variable in others.items()}, prefill_mode="off") == {}


def test_no_variable_of_the_command_reaches_the_engine() -> None:
    base = {variable.name: "1" for variable in registry().values() if variable.scope == "python"}
    assert child(base) == {"LLAMA_PHASE_PREFILL_MODE": "transaction"}


def test_l8_falsy_values_of_presence_variables_are_left_out() -> None:
    for value in ("0", "off", "false", "OFF", ""):
        base = dict.fromkeys([*PRESENCE_MEANS_ON, "LLAMA_ARG_NO_MMAP"], value)
        assert child(base, prefill_mode="off") == {}
    base = dict.fromkeys(PRESENCE_MEANS_ON, "1")
    assert child(base, prefill_mode="off") == base


def test_l8_values_upstream_reads_stay() -> None:
    base = {"GGML_OP_OFFLOAD_MIN_BATCH": "0", "LLAMA_ARG_JINJA": "0", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "0",
            "GGML_VK_VISIBLE_DEVICES": ""}  # fmt: skip
    assert child(base, prefill_mode="off") == base


def test_l10_empty_upstream_variables_do_not_stop_the_start() -> None:
    assert child({"LLAMA_ARG_THREADS": "", "GGML_CUDA_P2P": "", "LANG": ""}, prefill_mode="off") == {"LANG": ""}


def test_a_flag_of_ours_replaces_the_upstream_variable() -> None:
    base = {"LLAMA_ARG_UBATCH": "64", "LLAMA_ARG_PORT": "1", "LLAMA_ARG_THREADS": "4", "LLAMA_API_KEY": "old"}
    assert child(base, prefill_mode="off") == {"LLAMA_ARG_THREADS": "4"}
    assert child(base, prefill_mode="off", api_key="new")["LLAMA_API_KEY"] == "new"


def test_own_environment_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_CUDA_P2P", "0")
    before = dict(os.environ)
    child_environment(load(api_key="k"))
    assert dict(os.environ) == before


@pytest.mark.skipif(not (ROOT / "llama.cpp" / "ggml").is_dir(), reason="no pinned source here: make source")
def test_every_presence_check_of_the_pinned_source_is_in_the_table() -> None:
    name = r'(?:std::)?getenv\("((?:LLAMA|GGML)_\w+)"\)'
    check = re.compile(rf"!\s*{name}|{name}\s*[!=]=\s*(?:nullptr|NULL)|if \({name}\)")
    read_by_value = {"GGML_CUDA_DISABLE_FUSION", "GGML_ZENDNN_ADAPTIVE_FALLBACK"}  # `!= nullptr && atoi(...)`
    found = set()
    for folder in ("src", "common", "tools/server", "ggml/src"):
        for path in (ROOT / "llama.cpp" / folder).rglob("*"):
            if path.suffix in (".cpp", ".c", ".cu", ".cuh", ".h") and "opencl" not in str(path):
                for match in check.finditer(path.read_text(errors="replace")):
                    found.add(next(filter(None, match.groups())))
    assert {"GGML_CUDA_P2P", "LLAMA_TRACE"} <= found
    assert found - PRESENCE_MEANS_ON - read_by_value == set()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("LLAMA_PHASE_PREFIL_MODE", "LLAMA_PHASE_PREFILL_MODE"),
        ("LLAMA_PHASE_UBATCH_PREFILL", "LLAMA_PHASE_"),
        ("llama_phase_port", "LLAMA_PHASE_PORT"),
        ("LLAMA_PHASE_", "LLAMA_PHASE_"),
    ],
)
def test_l9_unknown_names_are_refused(name: str, near: str) -> None:
    with pytest.raises(UsageError) as caught:
        scan({name: "1", "PATH": "x"})
    assert name in str(caught.value) and near in caught.value.fix


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("LLAMA_PHASE_PREFILL_MODE", ["on", "Transaction", " off"], ["off", "bypass", ""]),
        ("LLAMA_PHASE_PREFILL_UBATCH", ["0", "-1", "65537", "2k", "2048.0", "٣"], ["1", "65536", ""]),
        ("LLAMA_PHASE_PREFILL_MIN_TOKENS", ["0", "AUTO"], ["auto", "1", ""]),
        ("LLAMA_PHASE_PORT", ["65536", "http"], ["0", "65535"]),
        ("LLAMA_PHASE_BUDGET_MIB", ["1,,2", "1,-2", "x"], ["1024", "1024,2048", ""]),
    ],
)
def test_values_are_checked_and_the_accepted_ones_named(name: str, bad: list[str], good: list[str]) -> None:
    for value in good:
        scan({name: value})
    for value in bad:
        with pytest.raises(UsageError) as caught:
            scan({name: value})
        assert name in str(caught.value) and registry()[name].accepted in caught.value.fix


def test_the_page_says_which_exit_code_a_refused_variable_has() -> None:
    head = (ROOT / "docs" / "env.md").read_text().partition("\n## ")[0]
    assert f"exit code {UsageError.exit_code} from `llama-phase`" in head and "78 from the engine" in head


def test_one_boolean_dialect() -> None:
    assert [parse_bool(text) for text in ("1", "on", "TRUE", "")] == [True, True, True, None]
    assert [parse_bool(text) for text in ("0", "off", "False")] == [False] * 3
    for text in ("yes", "2", "enabled"):
        with pytest.raises(ValueError):
            parse_bool(text)


def test_rows_say_what_serve_takes_from_variables_of_the_server() -> None:
    for name, variable in UPSTREAM_ENVIRONMENT.items():
        rows = {row["name"]: row for row in describe({variable: "42182"})}
        row = rows[f"LLAMA_PHASE_{name.upper()}"]
        assert (row["value"], row["source"]) == ("(set)" if name == "api_key" else "42182", f"environment {variable}")


def test_rows_for_people_name_source_and_hide_secrets() -> None:
    base = {"LLAMA_PHASE_PORT": "9", "LLAMA_PHASE_API_KEY": "s3cret"}
    rows = {row["name"]: row for row in describe(base)}
    assert set(rows) == set(registry())
    assert (rows["LLAMA_PHASE_PORT"]["value"], rows["LLAMA_PHASE_PORT"]["source"]) == ("9", "environment")
    assert rows["LLAMA_PHASE_PREFILL_MODE"]["value"] == "transaction"
    assert "s3cret" not in json.dumps(list(rows.values()))


@pytest.mark.parametrize("as_json", [False, True])
def test_env_command(as_json: bool) -> None:
    command = [sys.executable, "-m", "llama_phase.cli", "env", *(["--json"] if as_json else [])]
    environment = dict(os.environ, LLAMA_PHASE_API_KEY="s3cret", LLAMA_PHASE_PORT="81")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in done.stdout + done.stderr
    if as_json:
        assert {row["name"]: row["value"] for row in json.loads(done.stdout)}["LLAMA_PHASE_PORT"] == "81"
    else:
        assert "LLAMA_PHASE_PORT = 81" in done.stdout
