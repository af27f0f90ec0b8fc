"""What the measuring program makes of its samples, and how it is started."""

from __future__ import annotations

import io
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from engine_server import ROOT
from rich.console import Console

from llama_phase.bench import gpu_suite, prefetch_suite, table, upload_gb_per_s
from llama_phase.bench_prefill import gpu2_suite, prefill_suite
from llama_phase.bench_restore import restore_suite
from llama_phase.bench_speculation import at_rate, speculation_suite, speculation_table


def sample(**changes: Any) -> dict[str, Any]:
    """A long prompt that streamed 45 GB in 1000 ms, of which 100 went to the switches."""
    prompt = {"kind": "prefill", "text": 1, "prompt_ms": 1000.0, "prompt_per_second": 8192.0}
    switch = {"streamed_bytes": 45 * 10**9, "enter_ms": 60.0, "leave_ms": 40.0, "copy_ms": 800.0, "exposed_ms": 200.0}
    return prompt | switch | {"predicted_per_second": 50.0, "hit_rate": 0.7, "tokens": [1, 2]} | changes


def shown(results: dict[str, list[dict[str, Any]]]) -> tuple[list[dict[str, str]], str]:
    """The rows of the table by column, and its text."""
    made = table(results)
    names = [str(column.header) for column in made.columns]
    cells = [list(column.cells) for column in made.columns]
    rows = [dict(zip(names, map(str, row), strict=True)) for row in zip(*cells, strict=True)]
    out = io.StringIO()
    Console(file=out, width=250).print(made)
    return rows, " ".join(out.getvalue().split())


def test_bytes_over_the_link_and_their_rate_are_of_one_prompt_without_the_switches() -> None:
    stock = sample(streamed_bytes=0, enter_ms=None, leave_ms=None, copy_ms=0.0, exposed_ms=0.0)
    both = sample(streamed_bytes=90 * 10**9)
    given = {"stock": stock, "one": sample(), "two": both}
    rows, text = shown({name: [{"samples": [one], "memory_mib": None}] for name, one in given.items()})
    assert [(row["GB"], row["GB/s"]) for row in rows] == [("", ""), ("45.0", "50.0"), ("90.0", "100.0")]
    assert rows[1]["overlap %"] == "75" and rows[1]["swap ms"] == "100"
    for part in ("GB: streamed through the ring", "without the switches", "counted nowhere"):
        assert part in text, text
    assert upload_gb_per_s(sample(prompt_ms=90.0)) is None


def test_one_gpu_and_two_are_compared_where_copies_bound_the_prompt() -> None:
    suite = {one.name: one for one in gpu2_suite(8)}
    one, two = (suite[f"{name}: phase, prefill 1024"] for name in ("1 GPU", "2 GPUs"))
    assert one.settings == two.settings and one.settings["prefill_ubatch"] == 1024
    assert set(two.upstream) - set(one.upstream) == {"-ts", "1,1"}
    assert set(one.upstream) - set(two.upstream) == {"--device", "CUDA0"}


def test_no_configuration_asks_for_fewer_slots_than_the_engine_takes() -> None:
    suites = [
        *(suite(8) for suite in (gpu_suite, prefetch_suite, prefill_suite, gpu2_suite)),
        restore_suite(8, "64,128"),
        speculation_suite(8, "128", (0.5,)),
    ]
    asked = [one for suite in suites for one in suite if "expert_slots" in one.settings]
    assert len(asked) > 20
    for one in asked:
        assert int(one.settings["expert_slots"]) >= 10 * one.settings.get("expert_batch", 8), one.name


def spoken(accepted: int, milliseconds: float, draft_rounds: tuple[int, ...] = (), kind: str = "decode") -> list[dict]:
    """A round of the suite with one text of 100 tokens, of which `accepted` were drafted, and their time."""
    sample = {"kind": kind, "tokens": [5] * 100, "predicted_per_second": 100000 / milliseconds, "accepted": accepted}
    return [{"samples": [sample | {"draft_rounds": list(draft_rounds), "drafted": accepted + 20, "hit_rate": 0.9}],
             "phase": None, "memory_mib": 10.0}]  # fmt: skip


def test_lengths_are_compared_as_if_the_asked_share_of_drafts_had_been_accepted() -> None:
    """Two lengths that take the same time a round, of which one was luckier, are equally fast; a chosen length counts
    the rounds of each."""
    lucky, unlucky = spoken(60, 400.0), spoken(40, 600.0)
    assert at_rate("0.5 2", lucky, "decode") == pytest.approx(40 * 1.75 / 0.4)
    assert at_rate("0.5 2", unlucky, "decode") == pytest.approx(60 * 1.75 / 0.6)
    assert at_rate("0.5 auto", spoken(50, 500.0, (10, 30, 0, 10)), "decode") == pytest.approx(
        (10 + 30 * 1.5 + 10 * 1.875) / 0.5
    )
    assert at_rate("off", spoken(0, 500.0), "decode") == pytest.approx(200)
    results = {}
    for name, one in {"off": spoken(0, 800.0), "0.5 1": spoken(30, 560.0), "0.5 2": lucky, "0.5 auto": unlucky}.items():
        (text,) = one[0]["samples"]
        text |= {"draft_rounds": [0, 0, 60]} if "auto" in name else {}
        results[name] = [one[0] | {"samples": [text, text | {"kind": "prose"}]}]
    out = io.StringIO()
    Console(file=out, width=200).print(speculation_table(results))
    lines = [[cell.strip() for cell in line.split("│")] for line in out.getvalue().splitlines() if line.startswith("│")]
    cells = {line[2]: line for line in lines}
    assert cells["2"][3:7] == ["250 / 250", "175 / 175", "1.40 / 1.40", ""]
    assert cells["auto"][3:7] == ["167 / 167", "175 / 175", "1.40 / 1.40", "0.93 / 0.93"]


def test_the_static_rival_is_in_the_gpu_suite() -> None:
    """A large micro-batch for everything pays with slots: no switch, as many as 64 beside 128 and 256 of ours."""
    (rival,) = [one for one in gpu_suite(8) if one.name.startswith("static")]
    assert rival.settings["prefill_mode"] == "off" and rival.settings["ubatch"] == 2048
    assert rival.settings["expert_slots"] < 128 and "--cpu-moe" in rival.upstream


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_bench_gpu_is_a_verb() -> None:
    def make(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", "--no-print-directory", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )

    done = make("-n", "bench-gpu", "MODEL=a b.gguf", "SUITE=gpu2", "BENCH_ARGS=--runs 2")
    (line,) = [line for line in done.stdout.splitlines() if "llama_phase.bench " in line]
    assert line.endswith("llama_phase.bench 'a b.gguf' --suite gpu2 --json 'bench-gpu2.json' --runs 2")
    assert "llama_phase.build --backend cuda" in done.stdout
    done = make("bench-gpu")
    assert done.returncode == 2 and "llama_phase" not in done.stdout, "nothing is built first"
    assert "error: no model is named" in done.stderr and "make bench-gpu MODEL=" in done.stderr
    assert not list(Path(ROOT).glob("bench-*.json"))
