"""Reading of what tools/kernel_times.cpp writes."""

from __future__ import annotations

from pathlib import Path

import kernel_times
import pytest
import traced

LINES = [
    "3 1 10 4.0 0.0 1 1024 find_kernel(phase_kv_rows, phase_cuda_row_lists)",
    "7 1 200 4.0 1.0 33 1024 (anonymous namespace)::find_kernel(phase_kv_rows, phase_cuda_row_lists)",
    "7 2 200 6.0 1.5 33 1024 (anonymous namespace)::find_kernel(phase_kv_rows, phase_cuda_row_lists)",
    "7 3 100 8.0 -2.0 10 256 void mul_mat_vec_q<(ggml_type)2, 1, true>(void const*, int)",
    "8 1 100 1.0 0.0 0 0 memcpy",
    "9 1 201 8.0 0.0 1 256 upload_kernel(upload_args)",
]


def test_the_graph_that_ran_most_often_by_names() -> None:
    graph = kernel_times.most_often(kernel_times.nodes_of(LINES))
    assert graph.runs == 200 and set(graph.kernels) == {"find_kernel", "mul_mat_vec_q"}
    find, product = graph.kernels["find_kernel"], graph.kernels["mul_mat_vec_q"]
    assert (find.calls, find.run_us, find.gap_us) == pytest.approx((2.0, 10.0, 2.5))
    assert (product.calls, product.run_us, product.gap_us) == pytest.approx((0.5, 4.0, -1.0)), "ran in every other run"
    lines = kernel_times.report(graph).splitlines()
    assert lines[0].startswith("200 runs; per run 2 kernels and copies, 14 us, gaps 2 us")
    assert lines[2].split() == ["2", "10.0", "5.00", "2.5", "1.25", "find_kernel"]


def test_nothing_ran() -> None:
    assert kernel_times.report(kernel_times.most_often(kernel_times.nodes_of([""]))) == "no CUDA graph ran"


def test_flags_of_the_server_stand_behind_the_options() -> None:
    parser = traced.options_of("what it does", 200)
    options = traced.parsed(parser, ["m.gguf", "--depth", "8", "--", "-ngl", "99", "--depth", "--", "x"])
    assert (options.model, options.depth, options.flags) == (Path("m.gguf"), 8, ["-ngl", "99", "--depth", "--", "x"])
    assert traced.parsed(parser, ["--depth", "8", "m.gguf"]).flags == []
