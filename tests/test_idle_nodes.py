"""A branch of a graph that does not run has no say in how many CPU threads do."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

N_THREADS = 7
F32, I32 = 0, 26


class Plan(ctypes.Structure):
    """ggml_cplan"""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    )


class InitParams(ctypes.Structure):
    """ggml_init_params"""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def planned_threads(folder: Path, branch: int) -> int:
    """Threads of a graph that selects between a looked-up row (0) and a copied one (1)."""
    base, cpu = (ctypes.CDLL(str(folder / f"libggml-{name}.so")) for name in ("base", "cpu"))
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    signatures = {
        "ggml_init": (pointer, InitParams),
        "ggml_free": (None, pointer),
        "ggml_new_tensor_1d": (pointer, pointer, ctypes.c_int, long),
        "ggml_new_tensor_2d": (pointer, pointer, ctypes.c_int, long, long),
        "ggml_get_rows": (pointer, pointer, pointer, pointer),
        "ggml_dup": (pointer, pointer, pointer),
        "ggml_new_graph": (pointer, pointer),
        "ggml_build_forward_select": (pointer, pointer, ctypes.POINTER(pointer), ctypes.c_int, ctypes.c_int),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(base, name)
        function.restype, function.argtypes = result, arguments
    cpu.ggml_graph_plan.restype, cpu.ggml_graph_plan.argtypes = Plan, (pointer, ctypes.c_int, pointer)

    context = base.ggml_init(InitParams(1 << 20, None, True))
    table = base.ggml_new_tensor_2d(context, F32, 64, 100)
    row = base.ggml_get_rows(context, table, base.ggml_new_tensor_1d(context, I32, 1))
    copy = base.ggml_dup(context, base.ggml_new_tensor_2d(context, F32, 64, 1))
    graph = base.ggml_new_graph(context)
    base.ggml_build_forward_select(graph, (pointer * 2)(row, copy), 2, branch)
    n_threads = cpu.ggml_graph_plan(graph, N_THREADS, None).n_threads
    base.ggml_free(context)
    return n_threads


@pytest.mark.parametrize(("branch", "expected"), [(0, 1), (1, N_THREADS)])
def test_threads_follow_the_branch_that_runs(engine: Path, branch: int, expected: int) -> None:
    assert planned_threads(engine, branch) == expected


def test_upstream_counts_both_branches(stock_engine: Path) -> None:
    """When this fails the patch can go."""
    assert planned_threads(stock_engine, 0) == N_THREADS
