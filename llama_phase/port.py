"""Whether a TCP port can be had, and who holds it if not: asked before a model is loaded, not after."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterable

import psutil

from llama_phase.errors import PortBusy, UsageError

PORT_FLAG = "--port N (0: any free one)"


def check_port(hosts: Iterable[str], port: int) -> None:
    """Raise PortBusy when `port` is taken on one of `hosts`, UsageError when it cannot be bound for another reason.

    Binds as llama-server does, with SO_REUSEADDR: connections in TIME_WAIT do not make a port busy.
    """
    hosts = list(hosts)
    for host in hosts:
        _listen(host, port).close()
    with contextlib.ExitStack() as held:
        for host in hosts:
            try:
                held.enter_context(_listen(host, port))
            except PortBusy:  # it was free alone
                raise UsageError(f"{host} is the same as, or part of, another host", fix="keep one of them") from None


def free_port(host: str) -> int:
    """A port that is free on `host` now. Somebody may take it before the server does: that ends in PortBusy.

    Raises UsageError when nothing can listen there.
    """
    with _listen(host, 0) as probe:
        return probe.getsockname()[1]


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens; the caller closes it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UsageError(f"{host!r} is no address of this machine", fix="use --host 127.0.0.1") from None
    family, kind, protocol, _, address = found[0]
    probe = None
    try:
        probe = socket.socket(family, kind, protocol)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)
        return probe
    except OSError as error:
        if probe is not None:
            probe.close()
        if error.errno == errno.EADDRINUSE:
            raise port_busy(host, port, flag=PORT_FLAG) from None
        raise UsageError(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}",
            fix="choose another --host or --port",
        ) from None


def port_busy(host: str, port: int, *, flag: str = "") -> PortBusy:
    """The error for a taken port, with the holder's pid and command when this user may see it. `flag` chooses it."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        connections = []
    pids = {c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid}
    holders = ", ".join(f"pid {pid} ({_command(pid)})" for pid in sorted(pids)) or "a process of another user"
    return PortBusy(
        f"port {port} on {host} is taken by {holders}",
        fix="stop it, or choose another port" + (f": {flag}" if flag else ""),
    )


def listens(pid: int, port: int) -> bool:
    """Whether process `pid` or a child of it listens on `port`; True when that cannot be seen."""
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            connections = process.net_connections if hasattr(process, "net_connections") else process.connections
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections(kind="tcp")):
                return True
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError):
        return True
    return False


def _command(pid: int) -> str:
    """Program and script of a process. Not its flags: they may hold secrets."""
    try:
        line = psutil.Process(pid).cmdline()
        words = [os.path.basename(word) for word in line[:2] if not word.startswith("-")]
        return " ".join(words) or psutil.Process(pid).name()
    except psutil.Error:
        return "already gone"
