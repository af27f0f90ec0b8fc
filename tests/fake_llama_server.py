"""A scripted llama-server: the same flags and routes, no model. What it does wrong is asked for in FAKE_* variables.

FAKE_LOAD_S=n          /health answers 503 for n seconds
FAKE_HANG=1            never becomes ready, does nothing at all
FAKE_EXIT=code[:line]  prints the line, ends with this code before it is ready
FAKE_SIGNAL=name       prints a line, ends by this signal before it is ready
FAKE_CRASH_AFTER=n     ends by SIGSEGV n seconds after it is ready
FAKE_EXIT_AFTER=code   ends with this code 0.7 s after it is ready
FAKE_FLOOD_MB=n        writes n MB of log before it is ready
FAKE_IGNORE_TERM=1     ignores SIGTERM
FAKE_GRANDCHILD=file   starts a child of its own, writes its pid to the file
FAKE_DUMP=file         writes argv and environment as JSON to the file
FAKE_STARTS=file       appends its argv as a line of JSON to the file
FAKE_ONLY_IF=word      all of the above misbehaviour only when the word is among its flags
FAKE_PROBE=what        the first prompt: rolled_back, refused, empty, stuck, odd, or an exit code
FAKE_STUCK_AFTER=n     n seconds after it is ready /slots shows a busy slot without progress
FAKE_ODD_SLOTS=1       /slots answers nonsense
FAKE_ANSWER_S=n        prompts after the first take n seconds
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COUNTERS = {"entered": 2, "left": 2, "rolled_back": 0, "failed": 0}
PHASE = {
    "mode": "transaction",
    "phase": "decode",
    "ubatch": {"now": 512, "decode": 512, "prefill": 2048},
    "min_tokens": 1024,
    "counters": COUNTERS,
}
TIMINGS = """\
0.05.2 I slot print_timing: id  0 | task 1 | prompt processing, n_tokens =   2596, progress = 1.00, t =   4.72 s / 549.61 tokens per second
0.05.3 I slot print_timing: id  0 | task 1 | prompt eval time =    4809.62 ms /  2600 tokens (    1.85 ms per token,   540.58 tokens per second)
0.05.3 I slot print_timing: id  0 | task 1 |        eval time =      72.75 ms /     8 tokens (   10.39 ms per token,    96.23 tokens per second)
"""  # noqa: E501
METRICS = """# HELP llamacpp:prompt_tokens_seconds Average prompt throughput in tokens/s
llamacpp:prompt_tokens_seconds 223.7
llamacpp:predicted_tokens_seconds 17.5
llamacpp:requests_processing 1
llama_phase_entered_total 3
llama_phase_swap_ms_bucket{direction="enter",le="+Inf"} 3
"""


HARMLESS = ("DUMP", "STARTS", "ONLY_IF")


def setting(name: str) -> str:
    word = os.environ.get("FAKE_ONLY_IF", "")
    if word and word not in sys.argv and name not in HARMLESS:
        return ""
    return os.environ.get(f"FAKE_{name}", "")


def flag(*names: str, default: str = "") -> str:
    found = [sys.argv[i + 1] for i, word in enumerate(sys.argv[:-1]) if word in names]
    return found[-1] if found else default


class Handler(BaseHTTPRequestHandler):
    ready = False
    stuck = False
    key = ""
    n_prompts = 0
    n_running = 0
    answered = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(200 if Handler.ready else 503, {"status": "ok"})
        elif not self.allowed():
            self.reply(401, {"error": {"message": "Invalid API Key", "code": 401}})
        elif self.path == "/phase":
            self.reply(200, PHASE)
        elif self.path == "/slots":
            busy = Handler.stuck or Handler.n_running > 0
            if setting("ODD_SLOTS"):
                self.reply(200, ["none", {"id": []}])
                return
            self.reply(200, [{"id": 0, "id_task": Handler.n_prompts, "is_processing": busy}])
        elif self.path == "/metrics":
            self.reply(200, METRICS)
        elif self.path == "/props":
            self.reply(200, {"build_info": "fake"})
        else:
            self.reply(404, {"error": {"message": "File Not Found", "code": 404}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if not self.allowed():
            self.reply(401, {"error": {"message": "Invalid API Key", "code": 401}})
        elif self.path == "/tokenize":
            self.reply(200, {"tokens": [len(word) for word in body["content"].split()]})
        elif body.get("prompt") == "break":
            self.reply(503, {"error": {"message": "the engine lost its decode buffers", "code": 503}})
        elif self.path != "/completion":
            self.reply(404, {"error": {"message": "File Not Found", "code": 404}})
        else:
            self.complete(body)

    def complete(self, body: dict) -> None:
        Handler.n_prompts += 1
        probe = setting("PROBE") if Handler.n_prompts == 1 else ""
        if probe.isdigit():
            print("LLAMA_PHASE: leave failed at step reserve_decode", flush=True)
            os._exit(int(probe))
        if probe == "rolled_back":
            COUNTERS["rolled_back"] += 1
            PHASE["last_failure"] = "step enter.reserve: 300 MiB short on CUDA0"
        else:
            COUNTERS["entered"] += 1
            COUNTERS["left"] += 1
        if probe == "stuck":
            Handler.stuck = True
            time.sleep(600)
        if probe == "odd":
            self.reply(200, {"content": 5, "tokens": 7, "timings": None})
            PHASE["counters"] = "many"
            return
        if probe == "refused":
            self.reply(500, {"error": {"message": "failed to decode", "code": 500}})
            return
        if Handler.n_prompts > 1:
            Handler.n_running += 1
            time.sleep(float(setting("ANSWER_S") or 0))
        self.answer(body, empty=probe == "empty")
        Handler.answered.set()
        if Handler.n_prompts > 1:
            Handler.n_running -= 1
            print(TIMINGS, flush=True)

    def answer(self, body: dict, empty: bool) -> None:
        if body.get("stream"):
            self.send_response(200)
            self.end_headers()
            for piece in ({"content": "a", "tokens": [1], "stop": False},
                          {"content": "", "tokens": [], "stop": True, "timings": {"prompt_n": 3}}):  # fmt: skip
                self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        else:
            content, tokens = ("", []) if empty else ("ab", [1, 2])
            self.reply(200, {"content": content, "tokens": tokens, "stop_type": "limit", "timings": {"prompt_n": 3},
                             "request": body})  # fmt: skip

    def allowed(self) -> bool:
        return not Handler.key or self.headers.get("Authorization") == f"Bearer {Handler.key}"

    def reply(self, status: int, body: object) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def die(name: str) -> None:
    if name != "SIGKILL":
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(10)


def main() -> int:
    print("fake: starting", flush=True)
    if setting("IGNORE_TERM"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if setting("DUMP"):
        with open(setting("DUMP"), "w") as file:
            json.dump({"argv": sys.argv, "environment": dict(os.environ), "pid": os.getpid()}, file)
    if setting("STARTS"):
        with open(setting("STARTS"), "a") as file:
            file.write(json.dumps(sys.argv) + "\n")
    if setting("GRANDCHILD"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(setting("GRANDCHILD"), "w") as file:
            file.write(str(child.pid))
    if setting("EXIT"):
        code, _, line = setting("EXIT").partition(":")
        print("fake: some harmless line\n" + line, flush=True)
        return int(code)
    if setting("SIGNAL"):
        print("fake: GGML_ASSERT(buffer) failed", flush=True)
        die(setting("SIGNAL"))
    host, port = flag("--host", default="127.0.0.1"), int(flag("--port", default="8080"))
    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError:
        print(f"0.00.001.000 E srv  couldn't bind HTTP server socket, hostname: {host}, port: {port}", flush=True)
        return 1
    Handler.key = os.environ.get("LLAMA_API_KEY", "")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for _ in range(int(setting("FLOOD_MB") or 0)):
        print(("x" * 99 + "\n") * 10_000, end="", flush=True)
    if setting("HANG"):
        time.sleep(600)
    time.sleep(float(setting("LOAD_S") or 0))
    print("fake: listening", flush=True)
    print(TIMINGS, flush=True)
    Handler.ready = True
    if setting("CRASH_AFTER"):
        Handler.answered.wait()
        time.sleep(float(setting("CRASH_AFTER")))
        print("CUDA error: an illegal memory access was encountered", flush=True)
        die("SIGSEGV")
    if setting("EXIT_AFTER"):
        Handler.answered.wait()
        time.sleep(1.0)
        print("LLAMA_PHASE: leave failed at step reserve_decode", flush=True)
        return int(setting("EXIT_AFTER"))
    ended = threading.Event()
    if not setting("IGNORE_TERM"):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
    if setting("STUCK_AFTER"):
        Handler.answered.wait()
    stuck_at_s = time.monotonic() + float(setting("STUCK_AFTER") or 1e9)
    while not ended.wait(0.05):
        Handler.stuck = Handler.stuck or time.monotonic() >= stuck_at_s
    print("fake: cleaning up before exit", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
