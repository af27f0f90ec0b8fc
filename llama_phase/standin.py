"""Answers on the public port while no server listens there: 503, Retry-After, and the reason as JSON.

Open from the death of a server to the start of the next (back-off, rollback); while a server loads it says 503 by
itself. Nothing is proxied: ``close`` gives the port up before a server is started. Between that and the moment the
server listens (its own start, before it loads) connections are refused.

One thread with an event loop, whatever the number of clients. A client that sends nothing, or takes its answer slowly,
costs a connection for a few seconds; beyond MAX_CLIENTS the oldest gives way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Sequence

import h11

from llama_phase.settings import Settings
from llama_phase.upstream_flags import SSL_CERT, SSL_KEY, flag_value

MAX_CLIENTS = 256
HEAD_S = 5.0  # for a client to send its request's head
LINGER_S = 1.0  # for it to take the answer; closing at once would lose it where a body is still being sent
MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 64 << 20  # read and thrown away
CLOSE_S = 5.0


class Standin:
    """Call ``open`` and ``close`` from one thread; ``say`` from any."""

    def __init__(self, hosts: Sequence[str], port: int, *, tls: ssl.SSLContext | None = None):
        """`hosts` are TCP addresses as of Settings.tcp_hosts; `tls` where the server speaks HTTPS."""
        self._hosts, self._port, self._tls = list(hosts), port, tls
        self._said = ("the server is not running", 5)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._clients: dict[asyncio.StreamWriter, None] = {}  # oldest first

    def __enter__(self) -> Standin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        return self._thread is not None

    def say(self, reason: str, retry_after_s: float = 5) -> None:
        """What the answers say from now on; `retry_after_s` is rounded up to whole seconds, 1 at least."""
        self._said = (reason, max(1, -int(-retry_after_s // 1)))

    def open(self) -> bool:
        """Listen on every host. False when one cannot be had (then on none): a stand-in must not hold up a restart."""
        if self._thread is not None:
            return True
        if not self._hosts:
            return False
        try:
            sockets = self._bind()
        except OSError:
            return False
        self._loop, self._ended = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._loop, sockets, self._ended), name="llama-phase-standin", daemon=True
        )
        self._thread.start()
        return True

    def close(self) -> None:
        """Drop all clients and give the port up; returns when it is free. Idempotent."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(self._ended.set)
        thread.join(CLOSE_S)
        self._loop = self._thread = None

    def _bind(self) -> list[socket.socket]:
        bound: list[socket.socket] = []
        try:
            for host in self._hosts:
                family, kind, protocol, _, address = socket.getaddrinfo(
                    host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )[0]
                listener = socket.socket(family, kind, protocol)
                bound.append(listener)
                # as llama-server: connections in TIME_WAIT keep neither of us from the port
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(MAX_CLIENTS)
        except OSError:
            for listener in bound:
                listener.close()
            raise
        return bound

    def _run(self, loop: asyncio.AbstractEventLoop, sockets: list[socket.socket], ended: asyncio.Event) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._listen(sockets, ended))
        finally:
            # the port first: somebody waits for it
            for listener in sockets:
                with contextlib.suppress(OSError, ValueError):
                    loop.remove_reader(listener.fileno())
                listener.close()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(asyncio.sleep(0))  # aborted transports close their sockets in the next round
            loop.close()

    async def _listen(self, sockets: list[socket.socket], ended: asyncio.Event) -> None:
        servers = [await asyncio.start_server(self._serve, sock=listener, ssl=self._tls) for listener in sockets]
        await ended.wait()
        del servers  # referenced until here; closed by their sockets, since Server.close may wait for clients

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients[writer] = None
        if len(self._clients) > MAX_CLIENTS:
            oldest = next(iter(self._clients))
            del self._clients[oldest]
            oldest.transport.abort()
        try:
            # a client that went away, or never asked, is none of our business; cancelled: ``close`` drops all of them
            with contextlib.suppress(OSError, asyncio.TimeoutError, asyncio.CancelledError):
                connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
                try:
                    method = await asyncio.wait_for(_request(connection, reader), HEAD_S)
                    status = 503
                except h11.RemoteProtocolError:
                    method, status = b"?", 400
                if method:
                    writer.write(self._answer(connection, status, with_body=method != b"HEAD"))
                    await asyncio.wait_for(_linger(reader, writer), LINGER_S)
        finally:
            self._clients.pop(writer, None)
            writer.transport.abort()

    def _answer(self, connection: h11.Connection, status: int, *, with_body: bool) -> bytes:
        reason, retry_after_s = self._said
        kind, text = ("unavailable_error", reason) if status == 503 else ("invalid_request_error", "not HTTP/1.1")
        body = json.dumps({"error": {"code": status, "message": text, "type": kind}}).encode()
        headers = [
            ("Content-Type", "application/json; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        if status == 503:
            headers.append(("Retry-After", str(retry_after_s)))
        phrase = {503: b"Service Unavailable", 400: b"Bad Request"}[status]
        return b"".join(
            connection.send(event) or b""
            for event in (
                h11.Response(status_code=status, headers=headers, reason=phrase),
                h11.Data(data=body if with_body else b""),
                h11.EndOfMessage(),
            )
        )


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> bytes:
    """Method of the request; empty when the client closed instead. Raises h11.RemoteProtocolError."""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(MAX_HEAD_BYTES))
        else:
            return event.method if isinstance(event, h11.Request) else b""


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
    left = MAX_BODY_BYTES
    while left > 0 and (data := await reader.read(64 << 10)):
        left -= len(data)


def standin_for(settings: Settings) -> Standin:
    """A stand-in for the server of these settings, whose port must be a real one. With certificates that cannot be
    used it opens nowhere: that is for the server to say."""
    certificate, key = (flag_value(settings.upstream, names) for names in (SSL_CERT, SSL_KEY))
    try:
        return Standin(settings.tcp_hosts, settings.port, tls=tls_of(certificate, key))
    except OSError:
        return Standin([], settings.port)


def tls_of(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """TLS with the server's own files, None without any. Raises OSError (ssl.SSLError) for files that do not do."""
    if not certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key or None)
    return context
