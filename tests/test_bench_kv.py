"""What `bench --suite kv` measures, and that it says when answers depend on where K/V is."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from llama_phase import bench, bench_kv
from llama_phase.bench import Workload
from llama_phase.bench_kv import DEFAULT_ROWS, depths_of, different_answers, kv_suite, kv_table

WORKLOAD = Workload(answer_tokens=128, depths=(2048, 8192, 32768, 131072))


def rounds_of(decode: dict[int, float], first: int = 1, memory: dict[int, float] | None = None) -> list[dict[str, Any]]:
    """One round: three turns at each depth, prompts ten times as fast as answers, which begin with `first`."""
    samples = [
        {"depth": depth, "turn": turn, "prompt_per_second": 10 * speed, "predicted_per_second": speed + turn - 1,
         "tokens": [first, depth, turn]}
        for depth, speed in decode.items() for turn in range(3)
    ]  # fmt: skip
    one = {"samples": samples, "memory_mib": max(memory.values()) if memory else 13000.0}
    return [one | ({"memory_by_ctx": memory} if memory else {})]


def text_of(results: dict[str, list[dict[str, Any]]]) -> str:
    out = io.StringIO()
    Console(file=out, width=250).print(kv_table(results))
    return " ".join(out.getvalue().split())


def test_places_are_compared_alike() -> None:
    """The usual rows: stock has none of our settings; both places differ in nothing but the place."""
    suite = {one.name: one for one in kv_suite(8, WORKLOAD)}
    usual = [one for one in suite.values() if any(bench._is_named(one, name) for name in DEFAULT_ROWS)]
    assert [one.name for one in usual if not one.once] == ["stock", "device", "device, fast", "host, fast"]
    assert [one.name for one in usual if one.once] == [
        "stock, -nkvo", *(f"VRAM {place}, -ub {n}" for place in ("device", "host") for n in (64, 128, 512))
    ]  # fmt: skip
    stock, device, host = (suite[name] for name in ("stock", "device, fast", "host, fast"))
    assert (stock.settings["prefill_mode"], stock.settings["kv"], stock.settings["select"]) == ("off", "device", "auto")
    assert device.settings | {"kv": "host"} == host.settings and device.upstream == host.upstream
    assert host.settings["prefill_mode"] == "bypass" and host.settings["ubatch"] == stock.settings["ubatch"]
    assert suite["host, all kept"].settings["kv_rows"] >= host.settings["ctx"] > 131072 + 3 * 128


def test_the_figures_of_the_table() -> None:
    device = {2048: 250.0, 8192: 250.0, 131072: 240.0}
    results = {
        "stock": rounds_of({depth: 200.0 for depth in device}),
        "device, fast": rounds_of(device),
        "host, fast": rounds_of({2048: 240.0, 8192: 240.0, 131072: 216.0}),
        "stock, -nkvo": rounds_of({8192: 10.0}, first=2),
        "VRAM host, -ub 64": rounds_of({}, memory={16384: 12000.0, 131072: 12616.0}),
    }
    text = text_of(results)
    for part in (
        "host, fast x device, fast: prompt 2048: 0.960, prompt 8192: 0.960, prompt 131072: 0.900, decode 2048: 0.960",
        "host, fast x stock, -nkvo: prompt 8192: 24.000, decode 8192: 24.000",
        "decode at 131072 x that at 8192: stock: 1.000, device, fast: 0.960, host, fast: 0.900",
        "12616 │ 5.50 │",
        "9/9",
        "0/3",
    ):
        assert part in text, text


def test_other_answers_are_found_where_the_selection_is_the_same() -> None:
    suite = kv_suite(8, WORKLOAD)
    speeds = {2048: 100.0, 8192: 100.0}
    results = {
        "stock": rounds_of(speeds, first=8),
        "device": rounds_of(speeds),
        "host, stock": rounds_of(speeds),
        "device, fast": rounds_of(speeds, first=3),
        "host, fast": rounds_of(speeds, first=3) * 2,
        "stock, -nkvo": rounds_of(speeds, first=9),
    }
    assert different_answers(suite, results) == []
    results["host, fast"] = [*rounds_of(speeds, first=3), *rounds_of(speeds, first=3)]
    results["host, fast"][1]["samples"][4]["tokens"] = [7]
    results["host, stock"] = rounds_of(speeds, first=5)
    found = different_answers(suite, results)
    assert [line.partition(":")[0] for line in found] == ["host, fast, round 2", "host, stock, round 1"]
    assert "at 8192 turn 1 not the answer of device, fast" in found[0]


@pytest.mark.parametrize("text", ["0,5", "many", ""])
def test_depths_are_lengths(text: str) -> None:
    assert depths_of("8192,2048") == (2048, 8192)
    with pytest.raises(ValueError):
        depths_of(text)


@pytest.mark.engine
def test_a_run_of_the_suite(
    engine: Path, model_path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rounds, of which the second one leaves out what is measured once; -nkvo has no time here. (A context is ours
    where it is larger than its micro-batch.)"""
    monkeypatch.setattr(bench_kv, "UBATCH", 128)
    monkeypatch.setattr(bench_kv, "NO_OFFLOAD_LIMIT_S", 0.05)
    monkeypatch.setattr(bench_kv, "VRAM_CONTEXTS", (1024, 2048))
    monkeypatch.setattr(bench_kv, "VRAM_PROMPT", 600)
    monkeypatch.setenv("LLAMA_PHASE_SERVER_BINARY", str(engine / "llama-server"))
    monkeypatch.setenv("LLAMA_PHASE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("LLAMA_PHASE_SELECT", "fast")  # of whoever measures: no row's
    file = tmp_path / "kv.json"
    words = ["--suite", "kv", "--depths", "900,300", "--answer-tokens", "12", "--rounds", "2", "--threads", "1"]
    for row in ("=stock", "=host, fast", "=device, fast", "nkvo", "host, -ub 64"):
        words += ["--only", row]
    code = bench.main([str(model_path("qwen4exp-thin")), *words, "--json", str(file)])
    said = capsys.readouterr().out
    assert code == 0, said
    record = json.loads(file.read_text())
    results = record["results"]
    assert {name: len(rounds) for name, rounds in results.items()} == {
        "stock": 2, "device, fast": 2, "host, fast": 2, "stock, -nkvo": 1, "VRAM host, -ub 64": 1
    }  # fmt: skip
    for name in ("stock", "device, fast", "host, fast"):
        samples = results[name][1]["samples"]
        assert [(one["depth"], one["turn"]) for one in samples] == [(d, turn) for d in (300, 900) for turn in range(3)]
        assert all(len(one["tokens"]) == 12 and one["predicted_per_second"] > 0 for one in samples)
    assert results["stock"][0]["phase"] == {"mode": "off", "phase": "decode"}
    assert results["host, fast"][0]["phase"]["mode"] == "bypass"
    assert results["host, fast"][0]["phase"]["kv"]["contexts"][0]["host_bytes"] > 0
    assert results["stock, -nkvo"][0]["samples"] == []
    assert set(results["VRAM host, -ub 64"][0]["memory_by_ctx"]) == {"1024", "2048"}
    assert "host, fast x device, fast: prompt 300: " in " ".join(said.split())
