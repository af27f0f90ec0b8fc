#!/usr/bin/env python3
"""Where a token's time goes on the GPU, kernel by kernel.

  [LLAMA_PHASE_...=...] tools/kernel_times.py MODEL [--depth N] [--tokens N] [--nodes FILE] -- [FLAGS OF llama-server]

Starts the built CUDA engine with a library that asks CUPTI for the times of all kernels in CUDA graphs
(tools/kernel_times.cpp), has it answer a random prompt of --depth tokens, and prints the graph that ran most often: per
token the kernels by name, how often each runs, how long, and how long nothing ran before it. Tracing makes gaps longer:
compare two traced runs. --nodes keeps the figures of every node of every graph.

exit codes: 0 done, 1 the server failed (its message), 2 wrong usage, 3 no CUDA engine, compiler or CUPTI.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from traced import cuda_toolkit, make_library, options_of, parsed, traced_client  # noqa: E402

from llama_phase.bench import prompt_tokens  # noqa: E402
from llama_phase.errors import LlamaPhaseError, MissingPrerequisite  # noqa: E402

LONGEST_NAME = 60


class Node(NamedTuple):
    """Microseconds, means of all runs of its graph."""

    graph: int
    runs: int
    run_us: float
    gap_us: float
    name: str


@dataclass
class Kernel:
    """All nodes of a name, per run of the graph."""

    calls: float = 0.0
    run_us: float = 0.0
    gap_us: float = 0.0


@dataclass
class Graph:
    runs: int = 0
    kernels: dict[str, Kernel] = field(default_factory=dict)

    def total(self, what: str) -> float:
        return sum(getattr(kernel, what) for kernel in self.kernels.values())


def short(name: str) -> str:
    """Without return type, template arguments and parameters."""
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", name, maxsplit=1)[0][:LONGEST_NAME]


def nodes_of(lines: Iterable[str]) -> list[Node]:
    parts = (line.rstrip("\n").split(" ", 7) for line in lines)
    return [Node(int(p[0]), int(p[2]), float(p[3]), float(p[4]), short(p[7])) for p in parts if len(p) == 8]


def most_often(nodes: Sequence[Node]) -> Graph:
    """The graph with the most runs, other than the single kernel that uploads inputs; of those, the one with the most
    nodes. Empty when nothing ran."""
    if not nodes:
        return Graph()
    runs: dict[int, list[int]] = {}
    for node in nodes:
        runs.setdefault(node.graph, []).append(node.runs)
    chosen = max(runs, key=lambda graph: (len(runs[graph]) > 1, max(runs[graph]), len(runs[graph])))
    out = Graph(max(runs[chosen]))
    for node in nodes:
        if node.graph == chosen:
            share = node.runs / out.runs
            kernel = out.kernels.setdefault(node.name, Kernel())
            kernel.calls += share
            kernel.run_us += node.run_us * share
            kernel.gap_us += node.gap_us * share
    return out


def report(graph: Graph) -> str:
    if not graph.runs:
        return "no CUDA graph ran"
    calls, run_us, gap_us = (graph.total(what) for what in ("calls", "run_us", "gap_us"))
    lines = [
        f"{graph.runs} runs; per run {calls:.0f} kernels and copies, {run_us:.0f} us, gaps {gap_us:.0f} us",
        f"{'calls':>6} {'run us':>8} {'each':>7} {'gap us':>8} {'each':>7}  name",
    ]
    for name, k in sorted(graph.kernels.items(), key=lambda item: -item[1].run_us - item[1].gap_us):
        each = (k.run_us, k.run_us / k.calls, k.gap_us, k.gap_us / k.calls)
        lines.append("{:6.0f} {:8.1f} {:7.2f} {:8.1f} {:7.2f}  {}".format(k.calls, *each, name))
    return "\n".join(lines)


def library_in(folder: Path) -> Path:
    """Raises MissingPrerequisite without a compiler or CUPTI."""
    toolkit = cuda_toolkit()
    places = [toolkit, toolkit / "extras" / "CUPTI", toolkit / "targets" / "x86_64-linux"]
    include = next((place / "include" for place in places if (place / "include" / "cupti.h").exists()), None)
    found = (at for place in places for end in ("lib64", "lib") for at in (place / end).glob("libcupti.so*"))
    cupti = next(found, None)
    if include is None or cupti is None:
        raise MissingPrerequisite("the CUDA toolkit has no CUPTI", fix="install it: cuda-cupti-dev")
    return make_library("kernel_times.cpp", folder, f"-I{include}", str(cupti), f"-Wl,-rpath,{cupti.parent}")


def main() -> int:
    parser = options_of(__doc__ or "", 200)
    parser.add_argument("--nodes", type=Path, help="where the figures of all nodes are kept")
    options = parsed(parser, sys.argv[1:])
    try:
        with tempfile.TemporaryDirectory() as folder:
            nodes = options.nodes or Path(folder) / "nodes"
            environment = {
                "CUDA_INJECTION64_PATH": str(library_in(Path(folder))),
                "KERNEL_TIMES": str(nodes.absolute()),
            }
            with traced_client(options.model, options.flags, environment) as client:
                prompt = prompt_tokens(options.depth, 1, options.vocabulary)
                answer = client.completion(prompt, options.tokens, cache_prompt=False, ignore_eos=True)
                print(f"{answer.timings['predicted_per_token_ms']:.2f} ms per token, traced", flush=True)
            lines = nodes.read_text().splitlines() if nodes.exists() else []
            print(report(most_often(nodes_of(lines))))
    except LlamaPhaseError as error:
        print(f"kernel_times: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
