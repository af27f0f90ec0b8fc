"""Where a supervised server's K/V is, as a note for `llama-phase status`, once the server is ready."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from llama_phase.client import Client, RequestFailed
from llama_phase.companions import Companion

if TYPE_CHECKING:
    from llama_phase.server import Server

REPORT_S = 10.0
_MIB, _GIB = 1 << 20, 1 << 30


def kv_notes(phase: Mapping[str, Any]) -> Iterator[str]:
    """A sentence about K/V in host memory, and one for each reason why it is not there. `phase` of GET /phase. Pure."""
    layers = [layer for context in phase.get("kv", {}).get("contexts", []) for layer in context["layers"]]
    host = [layer for layer in layers if layer["place"] == "host"]
    if host:
        size = sum(layer["bytes"] for layer in host)
        shown = f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.0f} MiB"
        kept = sorted({layer["rows"]["kept"] for layer in host if "rows" in layer})
        also = f"; the device keeps {' or '.join(map(str, kept))} positions of a layer as well" if kept else ""
        yield f"K/V of {_layers(len(host))} in host memory, {shown}{also}"
    stay = [(layer["device"], layer["reason"]) for layer in layers if layer["place"] != "host" and layer.get("reason")]
    for device, reason in dict.fromkeys(stay):
        yield f"K/V of {_layers(stay.count((device, reason)))} stays on {device}: {reason}"


def _layers(n: int) -> str:
    return f"{n} layer{'s' if n != 1 else ''}"


class KvNote(Companion):
    """For settings that may move K/V; `say` gets the sentences. In a thread: a server may be slow to answer."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say

    def ready(self, server: Server) -> None:
        threading.Thread(target=self._note, args=(server.client(),), name="llama-phase-kv", daemon=True).start()

    def _note(self, client: Client) -> None:
        try:
            with client:
                phase = client.phase(timeout_s=REPORT_S) or {}
        except (RequestFailed, OSError):  # what serves is not touched by a note that could not be made
            return
        for sentence in kv_notes(phase):
            self._say(sentence)
