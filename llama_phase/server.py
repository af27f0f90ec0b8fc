"""One llama-server: started, watched until it is healthy, stopped for certain.

For programs that want a server for a while (`with Server(settings) as server`), and for the supervisor, which proves
by a first prompt that it can serve as well. Its process dies with ours, leads a group of its own and writes its log
straight into a file: child_process.py.

That process is what is waited on, not its port: a death is seen within a tenth of a second. There is no time limit on
loading, only on showing no sign of life.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from llama_phase import exit_meaning, running_servers, server_log
from llama_phase.child_process import spawn
from llama_phase.client import Client
from llama_phase.config_file import expanded
from llama_phase.env import child_environment
from llama_phase.errors import LlamaPhaseError, MissingPrerequisite, ServerStartError, UsageError
from llama_phase.gguf_header import check_model
from llama_phase.lifecycle_terms import State
from llama_phase.port import PORT_FLAG, check_port, free_port, listens, port_busy
from llama_phase.settings import Settings, argv
from llama_phase.speculation import notes, with_speculation
from llama_phase.stall_watch import StallWatch, Vitals
from llama_phase.upstream_flags import DRAFT_MODEL, flag_value

TICK_S = 0.05
HEALTH_EVERY_S = 0.2
VITALS_EVERY_S = 1.0
ROOT = Path(__file__).resolve().parent.parent


def find_binary(settings: Settings) -> Path:
    """The llama-server to run: LLAMA_PHASE_SERVER_BINARY, else the build of the chosen backend (auto: CUDA first).

    Raises UsageError when the given one is not there, MissingPrerequisite when nothing is built.
    """
    if settings.server_binary is not None:
        source = settings.source("server_binary")
        path = expanded(settings.server_binary, f"server_binary ({source})")
        if not os.path.isfile(path) or not os.access(path, os.X_OK):
            raise UsageError(
                f"server_binary ({source}) is no program that you may run: {path}",
                fix="correct LLAMA_PHASE_SERVER_BINARY, or unset it to use the built engine",
            )
        return path.absolute()
    backends = ("cuda", "cpu") if settings.backend == "auto" else (settings.backend,)
    for backend in backends:
        path = ROOT / "build" / backend / "bin" / "llama-server"
        if os.access(path, os.X_OK):
            return path
    raise MissingPrerequisite(
        f"no engine is built for backend {settings.backend}",
        fix="run `llama-phase build`" + ("" if settings.backend == "auto" else f" --backend {settings.backend}"),
    )


class Server:
    """A llama-server with these settings. Use it as a context manager: entered it is ready, left it is gone.

    ``close`` may be called at any time, any number of times. A forgotten one is killed by the kernel at our exit.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        base_environment: Mapping[str, str] | None = None,
        check_port: Callable[..., None] = check_port,
    ):
        """`base_environment`: what the child's environment is made from (default: this process's)."""
        self.settings = settings
        self._base_environment = base_environment
        self.state = State.STOPPED
        self.log_path: Path | None = None
        self.pid: int | None = None
        self.returncode: int | None = None
        self.notes: list[str] = []  # what `start` found that is worth a line of the log
        self._check_port = check_port
        self._process: subprocess.Popen[bytes] | None = None
        self._record: Path | None = None

    def __enter__(self) -> Server:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Check everything that can be known before loading, then start the process.

        Raises ModelError, PortBusy, MissingPrerequisite, UsageError; nothing is left behind then.
        """
        if self._process is not None:
            raise RuntimeError("this server was started before; make a new one")
        settings = self.settings
        binary = find_binary(settings)
        target = check_model(settings.model)
        draft = flag_value(settings.upstream, DRAFT_MODEL)
        drafts = check_model(Path(draft), draft=True) if draft else []
        settings = self.settings = with_speculation(settings, target, drafts)
        self.notes = notes(settings, target, drafts)
        running_servers.reap_orphans(settings.state_path / "running")
        if settings.port == 0:
            settings = self.settings = settings.model_copy(update={"port": free_port(settings.tcp_hosts[0])})
        self._check_port(settings.tcp_hosts, settings.port)
        environment = child_environment(settings, self._base_environment)
        self.log_path, log_fd = server_log.open_log(settings.state_path / "log", settings.port)
        try:
            self._process = spawn([str(binary), *argv(settings)], environment, log_fd)
        except (OSError, subprocess.SubprocessError) as error:
            raise MissingPrerequisite(
                f"cannot run {binary}: {getattr(error, 'strerror', None) or error}", fix="run `llama-phase build`"
            ) from None
        finally:
            os.close(log_fd)
        self.pid = self._process.pid
        self.state = State.STARTING
        self._record = running_servers.write_record(settings.state_path / "running", self.pid)

    def wait_ready(
        self, *, stop_asked: Callable[[], bool] = lambda: False, progress: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait until the server answers /health. False when `stop_asked` said so first.

        `progress` is called every tick. Raises ServerStartError (or what the exit status means) as soon as the process
        ends, PortBusy when that was for the port, and ServerStartError when for `stall_s` the log did not grow and the
        process neither computed, read nor changed its memory.
        """
        watch, next_health_s, next_vitals_s = StallWatch(time.monotonic()), 0.0, 0.0
        with self.client() as client:
            while not stop_asked():
                self.check_alive()
                now = time.monotonic()
                if now >= next_health_s:
                    next_health_s = now + HEALTH_EVERY_S
                    # another server that took the port in between must not pass for ours
                    if client.healthy(timeout_s=0.5) and listens(self.pid or 0, self.settings.port):
                        self.state = State.READY
                        return True
                if now >= next_vitals_s:
                    next_vitals_s = now + VITALS_EVERY_S
                    idle_s = watch.idle_s(now, self.vitals())
                    if idle_s >= self.settings.stall_s:
                        raise self._stalled(idle_s)
                progress()
                time.sleep(TICK_S)
        return False

    def check_alive(self) -> None:
        """Raise what the end of the process means if it has ended by itself."""
        returncode = self.poll()
        if returncode is None or self.state in (State.STOPPING, State.STOPPED):
            return
        was_ready = self.state is State.READY
        self.state = State.FAILED
        raise self.explain(returncode, self.reasons(), was_ready=was_ready)

    def reasons(self) -> list[str]:
        """The lines of its log that say what went wrong."""
        return server_log.relevant_lines(server_log.read_tail(self.log_path)) if self.log_path else []

    def explain(self, returncode: int, lines: list[str], *, was_ready: bool) -> LlamaPhaseError:
        """The error for an end by itself."""
        if not was_ready and exit_meaning.bind_failed(lines):
            return port_busy(self.settings.tcp_hosts[0], self.settings.port, flag=PORT_FLAG)
        return exit_meaning.explain_exit(returncode, lines, was_ready=was_ready, log=str(self.log_path))

    def stop(self, *, hurry: Callable[[], bool] = lambda: False) -> None:
        """SIGTERM to the whole group, SIGKILL after `grace_s` seconds or as soon as `hurry` says so.

        Returns when nothing of it is left. Interrupted (Ctrl-C), it kills at once.
        """
        if self._process is None or self.poll() is not None:
            return
        self.state = State.STOPPING
        self._signal(signal.SIGTERM)
        deadline_s = time.monotonic() + self.settings.grace_s
        try:
            while self.poll() is None and time.monotonic() < deadline_s and not hurry():
                time.sleep(TICK_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group; returns when it is gone."""
        if self._process is not None and self.poll() is None:
            self.state = State.STOPPING
            self._signal(signal.SIGKILL)
            while self.poll() is None:
                time.sleep(TICK_S / 10)
        if self.state is not State.FAILED:
            self.state = State.STOPPED

    def close(self) -> None:
        """Stop it if it runs, drop its record. Idempotent."""
        try:
            self.stop()
        finally:
            self.kill()
            if self._record is not None:
                with contextlib.suppress(OSError):
                    self._record.unlink(missing_ok=True)

    @property
    def url(self) -> str:
        return self.settings.base_url

    def client(self) -> Client:
        """A client for this server; close it after use."""
        return Client(self.settings.base_url, api_key=self.settings.probe_key)

    def poll(self) -> int | None:
        """Exit status once the process is gone, None while it lives.

        Its last act is to kill the rest of its group while the zombie still holds the pid, so that the group id
        cannot have been given to somebody else.
        """
        if self._process is None or self.returncode is not None:
            return self.returncode
        try:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            # SIGCHLD is ignored: the kernel keeps neither zombie nor status, and the pid may be somebody else's now
            self.returncode = self._process.wait()
            return self.returncode
        if ended is None:
            return None
        self._signal(signal.SIGKILL)
        self.returncode = self._process.wait()
        return self.returncode

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.pid:
                os.killpg(self.pid, number)

    def vitals(self) -> Vitals:
        """Signs of life now; only the log's size once the process is gone."""
        log_bytes = server_log.size_bytes(self.log_path) if self.log_path else 0
        try:
            process = psutil.Process(self.pid)
            with process.oneshot():
                times = process.cpu_times()
                read = process.io_counters().read_bytes if hasattr(process, "io_counters") else 0
                return Vitals(log_bytes, times.user + times.system, process.memory_info().rss, read)
        except (psutil.Error, OSError):
            return Vitals(log_bytes)

    def _stalled(self, idle_s: float) -> LlamaPhaseError:
        self.kill()
        self.state = State.FAILED
        lines = self.reasons()
        return ServerStartError(
            f"llama-server showed no sign of life for {idle_s:.0f} s while starting, and was stopped"
            + "".join(f"\n  | {line[:300]}" for line in lines),
            fix=f"the whole log is {self.log_path}; LLAMA_PHASE_STALL_S allows more",
        )
