#!/usr/bin/env python3
"""What a token costs on the GPU and what passes between the graphs of two tokens, timed from outside of the engine.

  [LLAMA_PHASE_...=...] tools/between_graphs.py MODEL [--depth N] [--texts N] [--tokens N] [--calls FILE] --
                                           [FLAGS OF llama-server]

Starts the built CUDA engine behind a library that notes the runtime's calls (tools/between_graphs.cpp), has it answer
random prompts of --depth tokens, and prints per token: the graph's time on the GPU, the time between graphs, tokens
computed without a graph, and pauses of the host of 2 ms and more. --calls keeps the calls themselves, a line each.

exit codes: 0 done, 1 the server failed (its message), 2 wrong usage, 3 no CUDA engine, compiler or CUDA headers.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from traced import make_library, options_of, parsed, traced_client  # noqa: E402

from llama_phase.bench import prompt_tokens  # noqa: E402
from llama_phase.errors import LlamaPhaseError  # noqa: E402

PAUSE_NS = 2_000_000
ANSWER_NS = 150_000_000  # longer: another answer began


@dataclass
class Figures:
    """Milliseconds, one entry per token, of `pauses` per pause."""

    token: list[float] = field(default_factory=list)
    graph: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    direct: int = 0  # tokens computed kernel by kernel


def figures(lines: Iterable[str], logits_bytes: int | None = None) -> Figures:
    """What the library wrote. A token ends where its logits come down: the largest download of those that are seen at
    least half as often as the most frequent one (states saved behind a prompt are larger, and come layer by layer). Its
    graph is the longest: another one uploads the inputs. (So of several graphs a token, all but one are in between.)"""
    calls = [line.split() for line in lines]
    downloads = Counter(int(c[3]) for c in calls if c[0] == "down")
    often = max(downloads.values(), default=0) / 2
    size = logits_bytes or max((n for n, count in downloads.items() if count > often), default=0)
    ends = [i for i, c in enumerate(calls) if c[0] == "down" and int(c[3]) == size]
    out = Figures()
    last_graph_ms = None
    for a, b in pairwise(ends):
        part = calls[a : b + 1]
        took = int(part[-1][1]) - int(part[0][1])
        if took > ANSWER_NS:
            last_graph_ms = None
            continue
        out.token.append(took / 1e6)
        if any(int(c[4]) for c in part[1:]):
            out.direct += 1
            last_graph_ms = None
            continue
        launches = [(float(c[5]), float(c[6])) for c in part if c[0] == "launch" and float(c[6]) > 0]
        if launches:
            begin, end = max(launches, key=lambda launch: launch[1] - launch[0])
            out.graph.append(end - begin)
            if last_graph_ms is not None:
                out.between.append(begin - last_graph_ms)
            last_graph_ms = end
        gaps = (int(y[1]) - int(x[2]) for x, y in pairwise(part))
        out.pauses += [gap / 1e6 for gap in gaps if gap > PAUSE_NS]
    return out


def report(found: Figures) -> str:
    """One line a figure."""

    def both(values: list[float]) -> str:
        return f"median {statistics.median(values):.2f}, mean {statistics.mean(values):.2f} ms" if values else "none"

    lines = [f"token           {both(found.token)}, {len(found.token)} of them"]
    lines += [f"graph on GPU    {both(found.graph)}", f"between graphs  {both(found.between)}"]
    lines += [f"kernel by kernel {found.direct} tokens"]
    lines += [f"pauses of the host, 2 ms or more: {len(found.pauses)}, {sum(found.pauses):.0f} ms together"]
    return "\n".join(lines)


def main() -> int:
    parser = options_of(__doc__ or "", 300)
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--calls", type=Path, help="where the calls are kept")
    options = parsed(parser, sys.argv[1:])
    try:
        with tempfile.TemporaryDirectory() as folder:
            calls = options.calls or Path(folder) / "calls"
            library = make_library("between_graphs.cpp", Path(folder), "-ldl")
            environment = {"LD_PRELOAD": str(library), "BETWEEN_GRAPHS": str(calls.absolute())}
            with traced_client(options.model, options.flags, environment) as client:
                for text in range(options.texts):
                    prompt = prompt_tokens(options.depth, text, options.vocabulary)
                    answer = client.completion(prompt, options.tokens, cache_prompt=False, ignore_eos=True)
                    print(f"text {text}: {answer.timings['predicted_per_token_ms']:.2f} ms per token", flush=True)
            print(report(figures(calls.read_text().splitlines())))
    except LlamaPhaseError as error:
        print(f"between_graphs: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
