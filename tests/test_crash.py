"""What the end of a server is taken for, by lines as the pinned llama-server and its backends write them."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from llama_phase import crash
from llama_phase.errors import MissingPrerequisite, ModelError, PortBusy, ServerStartError, UsageError

BEFORE = [
    ("bad_flag", 1, "error: invalid argument: --no-such"),
    ("bad_flag", 1, 'error while handling argument "-ctk": Unsupported cache type: xx'),
    ("bad_flag", 1, 'error while handling argument "--device": invalid device: CUDA7'),
    ("bad_flag", 1, "error while handling argument \"--grammar-file\": error: failed to open file '/nofile'"),
    ("bad_variable", 1, 'error while handling environment variable "LLAMA_ARG_THREADS": stoi'),
    ("bad_variable", 78, "LLAMA_PHASE_RING: 99 is not accepted"),
    ("missing_file", 1, "gguf_init_from_file: failed to open GGUF file '/nofile' (No such file or directory)"),
    ("bad_model", 1, "llama_model_load: error loading model: unknown model architecture: 'abc'"),
    ("bad_model", 1, "gguf_init_from_reader: invalid magic characters: 'abcd', expected 'GGUF'"),
    ("oom_load", 1, "alloc_buffer: allocating 9000.00 MiB on device 0: cudaMalloc failed: out of memory"),
    ("oom_load", -signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'"),
    ("oom_load", 1, "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache"),
    ("oom_transaction", 75, "LLAMA_PHASE: leave failed at step leave.reserve_decode_buffers"),
    ("port", 1, "0.00.001.000 E srv  couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080"),
    ("illegal_instruction", -signal.SIGILL, "loading"),
    ("killed", -signal.SIGKILL, "loading"),
    ("signal", -signal.SIGSEGV, "GGML_ASSERT(buffer) failed"),
    ("exit", 1, "the server is built without SSL support"),
]  # fmt: skip
AFTER = [
    ("engine_unusable", 75, "LLAMA_PHASE: leave failed"),
    ("oom", -signal.SIGABRT, "CUDA error: out of memory"),
    ("killed", -signal.SIGKILL, ""),
    ("illegal_instruction", -signal.SIGILL, ""),
    ("signal", -signal.SIGSEGV, "CUDA error: an illegal memory access was encountered"),
    ("exit", 1, "error: invalid argument"),
    ("exit", 0, ""),
]


@pytest.mark.parametrize(("kind", "returncode", "line"), BEFORE)
def test_an_end_before_ready(kind: str, returncode: int, line: str) -> None:
    assert (
        crash.kind_of_exit(returncode, ["loading", line, "exiting due to model loading error"], was_ready=False) == kind
    )


@pytest.mark.parametrize(("kind", "returncode", "line"), AFTER)
def test_an_end_after_ready(kind: str, returncode: int, line: str) -> None:
    assert crash.kind_of_exit(returncode, [line], was_ready=True) == kind


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("port", PortBusy("port 1 is taken")),
        ("missing_file", ModelError("there is no file /m.gguf")),
        ("missing_file", ModelError("12 of 13 shards are missing")),
        ("bad_model", ModelError("/m.gguf is no GGUF")),
        ("program", MissingPrerequisite("no engine is built")),
        ("bad_setting", UsageError("it is wrong")),
    ],
)
def test_a_refusal_before_there_was_a_process(kind: str, error: Exception) -> None:
    assert crash.kind_of_error(error) == kind  # type: ignore[arg-type]


def test_after_ready_nothing_is_deterministic() -> None:
    error = ServerStartError("it ended\n  | line", fix="do this")
    for kind in crash.KINDS:
        assert not crash.failure_of(error, kind=kind, at_s=1.0, was_ready=True).deterministic
    first = crash.failure_of(error, kind="oom_load", at_s=1.0, lines=["x" * 1000])
    assert first.deterministic and first.text == "it ended" and first.exit_code == 9
    assert len(first.log_lines[0]) == 300


def test_every_kind_has_words_and_is_one() -> None:
    sets = crash.DETERMINISTIC | crash.MAY_PASS | crash.NOT_OF_THE_CONFIGURATION
    assert sets <= set(crash.KINDS) and crash.MAY_PASS <= crash.DETERMINISTIC
    source = "".join(
        (Path(crash.__file__).parent / f"{name}.py").read_text() for name in ("crash", "attempt", "readiness")
    )
    used = set(re.findall(r'kind(?: = |=|: str = )"(\w+)"', source)) | {kind for kind, _, _ in (*BEFORE, *AFTER)}
    assert used <= set(crash.KINDS)
