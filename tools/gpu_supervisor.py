#!/usr/bin/env python3
"""What only a GPU can show of the supervisor: memory that comes back after kills, and running out of it while loading.

usage: gpu_supervisor.py [--models FOLDER]      needs build/cuda (make build ENGINE=cuda) and nvidia-smi

exit codes: 0 all as expected, 1 something was not (named in the output)
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from synth_gguf import make_model  # noqa: E402

from llama_phase.lifecycle_terms import Policy  # noqa: E402
from llama_phase.settings import Settings  # noqa: E402
from llama_phase.supervisor import Supervisor  # noqa: E402
from llama_phase.supervisor_status import SupervisorStatus, read_status  # noqa: E402

FLAGS = ("-ngl", "99", "--cpu-moe", "-np", "1", "--no-warmup", "--no-ui")
TOO_MUCH = 1 << 26  # tokens of context: with F32 K/V more than 200 GiB
F32 = ("-ctk", "f32", "-ctv", "f32")
SLACK_MIB = 64
LIMIT_S = 240.0


class Asked:
    """Stands in for signals."""

    stop = False

    def asked(self) -> bool:
        return self.stop

    def asked_twice(self) -> bool:
        return False

    def change_asked(self) -> str | None:
        return None


class Run:
    """A supervisor in a thread; `status` is what it writes down."""

    def __init__(self, model: Path, folder: Path, more: tuple[str, ...] = (), **options: object):
        fixed = {"model": model, "port": 0, "ctx": 8192, "ubatch": 128, "backend": "cuda", "expert_slots": 8}
        settings = Settings.load(**fixed | {"expert_batch": 2} | options, upstream=(*FLAGS, *more))
        self.folder, self.asked, self.said = folder, Asked(), []
        policy = Policy(restarts=1, delay_s=0.2, settled_s=0.5)
        self.supervisor = Supervisor(settings, folder, policy=policy, say=self.said.append)
        self.thread = threading.Thread(target=self.supervisor.run, args=(self.asked,), daemon=True)
        self.thread.start()

    @property
    def status(self) -> SupervisorStatus:
        return read_status(self.folder) or SupervisorStatus()

    def until(self, condition: Callable[[SupervisorStatus], object]) -> SupervisorStatus:
        end_s = time.monotonic() + LIMIT_S
        while not condition(self.status):
            if time.monotonic() > end_s:
                raise SystemExit(
                    f"FAILED: not within {LIMIT_S:.0f} s: {self.status.to_dict()}\n" + "\n".join(self.said)
                )
            time.sleep(0.1)
        return self.status

    def close(self) -> None:
        self.asked.stop = True
        self.thread.join()


def used_mib() -> int:
    """Memory in use on all GPUs."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split())


def comes_back(before_mib: int) -> tuple[bool, int]:
    """Whether the memory is free again within 20 s, and how much is used then."""
    end_s = time.monotonic() + 20
    while used_mib() > before_mib + SLACK_MIB and time.monotonic() < end_s:
        time.sleep(0.2)
    used = used_mib()
    return used <= before_mib + SLACK_MIB, used


def check(model: Path, folder: Path) -> list[tuple[bool, str]]:
    results = []
    before = used_mib()
    run = Run(model, folder)
    first = run.until(lambda s: s.state in ("ready", "failed"))
    took = f"loaded in {first.load_s} s, first prompt {first.probe_s} s"
    results.append((first.state == "ready", f"{first.state}, {took}, {used_mib() - before} MiB used"))
    os.kill(first.server_pid or 0, signal.SIGKILL)
    again = run.until(lambda s: s.state == "failed" or (s.state == "ready" and s.restarts == 1))
    results.append((again.state == "ready", f"ready again after SIGKILL, {used_mib() - before} MiB used"))
    time.sleep(1.0)  # served for long enough to be noted
    run.close()
    back, used = comes_back(before)
    results.append((back, f"memory after the stop: {used} MiB, {before} before"))
    run = Run(model, folder, F32, ctx=TOO_MUCH)
    last = run.until(lambda s: s.state in ("ready", "failed") and s.failure is not None)
    kind, text = (last.failure.kind, last.failure.text) if last.failure else ("", "")
    results.append((kind == "oom_load", f"a context of {TOO_MUCH} tokens: {kind}: {text}"))
    results.append((last.state == "ready" and last.rollbacks == 1, f"then {last.state}, rollbacks {last.rollbacks}"))
    run.close()
    back, used = comes_back(before)
    results.append((back, f"memory after all: {used} MiB, {before} before"))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/llama-phase"))
    options = parser.parse_args()
    options.models.mkdir(parents=True, exist_ok=True)
    model = make_model("tiny-moe", options.models / "tiny-moe.gguf")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLAMA_PHASE_STATE_DIR"] = folder
        results = check(model, Path(folder))
    for good, text in results:
        print(f"{'ok' if good else 'FAILED'}: {text}")
    return 0 if all(good for good, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
