"""Under systemd: readiness, status and watchdog by sd_notify(3), and the unit that asks for them.

    READY=1      the server answered its probe prompt     STATUS=    what `systemctl status` shows
    STOPPING=1   it is going down                         WATCHDOG=1 at half of WatchdogSec, only while healthy

The protocol is a datagram to the socket named by NOTIFY_SOCKET. Without one nothing is sent. Nothing here raises for a
service manager that is not there any more: the model is served all the same.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

SEND_TIMEOUT_S = 1.0
WATCHDOG_S = 60
# Exit codes of a supervisor that has given up: it restarts its server itself, and has tried what there was to try.
RESTART_IS_FUTILE = (2, 3, 7, 8, 9, 10, 12, 75, 78)
STOPPED_BY_SIGNAL = (129, 130, 143)


class Notifier:
    """Tells the service manager. `send` takes one datagram; None: there is no service manager."""

    def __init__(self, send: Callable[[bytes], None] | None, watchdog_s: float | None = None):
        self._send = send
        self._watchdog_s = watchdog_s
        self._beaten_s: float | None = None
        self._status = ""
        self._was_ready = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Notifier:
        """As NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID of this process's environment say."""
        address = environment.get("NOTIFY_SOCKET", "")
        if not address.startswith(("/", "@")):
            return cls(None)
        return cls(lambda data: send_datagram(address, data), watchdog_period_s(environment, os.getpid()))

    def ready(self, status: str = "") -> None:
        """The server serves. Said once; later calls change the status."""
        if self._was_ready:
            self.status(status)
            return
        self._was_ready, self._status = True, status
        self._say("READY=1", *_status(status))

    def status(self, text: str) -> None:
        """One line for `systemctl status`; the same one again is not sent."""
        if text != self._status:
            self._status = text
            self._say(*_status(text))

    def stopping(self, status: str = "stopping") -> None:
        self._status = status
        self._say("STOPPING=1", *_status(status))

    def beat(self, now_s: float, *, healthy: bool) -> bool:
        """To be called often. Feeds the watchdog when half its time has passed; whether it did."""
        if self._watchdog_s is None or not healthy:
            return False
        if self._beaten_s is not None and now_s - self._beaten_s < self._watchdog_s / 2:
            return False
        self._beaten_s = now_s
        self._say("WATCHDOG=1")
        return True

    def _say(self, *lines: str) -> None:
        if self._send is not None and lines:
            with contextlib.suppress(OSError):
                self._send("\n".join(lines).encode())


def _status(text: str) -> list[str]:
    return ["STATUS=" + " ".join(text.split())] if text else []


def send_datagram(address: str, data: bytes) -> None:
    """To a UNIX socket; `@name` is one in the abstract namespace. Raises OSError."""
    target: str | bytes = b"\0" + os.fsencode(address[1:]) if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
        out.settimeout(SEND_TIMEOUT_S)
        out.sendto(data, target)


def watchdog_period_s(environment: Mapping[str, str], pid: int) -> float | None:
    """Seconds after which systemd gives `pid` up without a sign; None when it watches nobody, or somebody else."""
    text, whose = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not (text.isascii() and text.isdigit()) or int(text) == 0 or (whose and whose != str(pid)):
        return None
    return int(text) / 1e6


def unit_text(
    command: Sequence[str], *, folder: Path, description: str, environment: Mapping[str, str], grace_s: int
) -> str:
    """A unit that runs `command` in `folder`, where its configuration file and relative paths are."""
    lines = [
        "[Unit]",
        f"Description={description.replace('%', '%%')}",
        "After=network.target",
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"WorkingDirectory={str(folder).replace('%', '%%')}",
        *(f"Environment={_quoted(f'{name}={value}', dollars=False)}" for name, value in environment.items()),
        "ExecStart=" + " ".join(_quoted(word) for word in command),
        "# loading takes as long as it takes; the supervisor itself ends a load that stalls",
        "TimeoutStartSec=infinity",
        f"WatchdogSec={WATCHDOG_S}",
        "Restart=on-failure",
        "RestartSec=5",
        f"RestartPreventExitStatus={' '.join(map(str, RESTART_IS_FUTILE))}",
        f"SuccessExitStatus={' '.join(map(str, STOPPED_BY_SIGNAL))}",
        "# the supervisor ends its server; whatever were left is killed with the unit",
        "KillMode=mixed",
        "# requests finish, conversations are saved, the server ends",
        f"TimeoutStopSec={2 * grace_s + 80}",
        "# a server killed for memory is restarted by its supervisor",
        "OOMPolicy=continue",
        "# experts are pinned in host memory",
        "LimitMEMLOCK=infinity",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def _quoted(word: str, *, dollars: bool = True) -> str:
    """A word as systemd.syntax(7) reads it back."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("\n", "\\n")
    if dollars:
        text = text.replace("$", "$$")
    plain = word and not any(character.isspace() or character in "\"'\\;" for character in word)
    return text if plain else f'"{text}"'


def user_unit_path(name: str, environment: Mapping[str, str]) -> Path:
    """Where units of this user are."""
    home = environment.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "systemd" / "user" / f"{name}.service"
