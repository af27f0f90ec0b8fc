"""Reading of what tools/between_graphs.cpp notes."""

from __future__ import annotations

import between_graphs
import pytest


def token(at_ms: float, graph_ms: float, pause_ms: float = 0.0, direct: int = 0) -> list[str]:
    """Calls of a token whose logits are there `at_ms`: the host queues graph and download, then waits."""
    begin = at_ms - graph_ms

    def line(name: str, start: float, end: float, *more: object) -> str:
        return " ".join(map(str, (name, round(start * 1e6), round(end * 1e6), *more)))

    lines = [line("up", begin - pause_ms - 0.2, begin - pause_ms - 0.1, 16, 0, 0, 0)]
    if not direct:
        lines.append(line("launch", begin, begin, 0, 0, begin, at_ms))
    return [*lines, line("down", begin, begin, 600000, direct, 0, 0), line("wait", begin, at_ms, 0, 0, 0, 0)]


def test_graphs_and_what_is_between_them() -> None:
    lines = [line for i in range(1, 41) for line in token(10.0 * i, 8.0)]
    found = between_graphs.figures(lines)
    assert len(found.token) == 39 and found.token[0] == pytest.approx(10.0)
    assert found.graph == pytest.approx([8.0] * 39) and found.between == pytest.approx([2.0] * 38)
    assert found.pauses == [] and found.direct == 0


def test_a_pause_and_a_token_without_graph_are_told_apart() -> None:
    odd = {7: (20.0, 0), 9: (0.0, 1800)}
    lines = [line for i in range(1, 31) for line in token(9.5 * i + 30.0 * (i >= 7), 8.0, *odd.get(i, ()))]
    found = between_graphs.figures(lines)
    assert found.direct == 1
    assert sorted(found.pauses) == pytest.approx([11.3, 20.1], abs=0.01)
    assert "kernel by kernel 1 tokens" in between_graphs.report(found)


def test_the_graph_that_uploads_inputs_is_between() -> None:
    lines = []
    for i in range(1, 41):
        at = 10.0 * i - 8.5
        lines += [f"launch {round(at * 1e6)} {round(at * 1e6)} 0 0 {at} {at + 0.01}", *token(10.0 * i, 8.0)]
    found = between_graphs.figures(lines)
    assert found.graph == pytest.approx([8.0] * 39) and found.between == pytest.approx([2.0] * 38)


def test_a_token_without_graph_has_none_though_its_inputs_do() -> None:
    lines = []
    for i in range(1, 41):
        at = 10.0 * i - 8.5
        upload = f"launch {round(at * 1e6)} {round(at * 1e6)} 0 0 {at} {at + 0.01}"
        lines += [upload, *token(10.0 * i, 8.0, direct=1800 if i % 2 else 0)]
    found = between_graphs.figures(lines)
    assert found.direct == 19 and found.graph == pytest.approx([8.0] * 20) and found.between == []


def test_states_saved_behind_a_prompt_are_no_logits() -> None:
    saved = [f"down {i} {i + 1} 2000000 0 0 0" for i in range(18)]
    lines = saved + [line for i in range(1, 41) for line in token(10.0 * i, 8.0)]
    assert len(between_graphs.figures(lines).graph) == 39


def test_another_answer_is_no_token() -> None:
    lines = [*token(10.0, 8.0), *token(20.0, 8.0), *token(900.0, 8.0), *token(910.0, 8.0)]
    assert between_graphs.figures(lines).token == pytest.approx([10.0, 10.0])
    assert between_graphs.report(between_graphs.figures([])).startswith("token           none")
