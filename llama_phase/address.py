"""Where a server listens and what opens it: addresses and API keys, checked before a request could fail on them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path

from llama_phase.errors import UsageError


def plain_hosts(text: str) -> str:
    """Each address once, an IPv6 one without the brackets of a URL: llama-server wants it so."""
    hosts = [host.strip() for host in text.split(",")]
    return ",".join(dict.fromkeys(host[1:-1] if host[:1] + host[-1:] == "[]" else host for host in hosts if host))


def check_hosts(hosts: Iterable[str], source: str) -> None:
    """Raise UsageError, which names `source`, for a host that no URL can hold."""
    for host in hosts:
        if not (re.fullmatch(r"[A-Za-z0-9._-]+", host) or _is_ipv6(host)):
            raise UsageError(
                f"host {host!r} ({source}) is neither a name nor an address",
                fix="write 127.0.0.1, ::1 or localhost; several are separated by commas",
            )


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def read_api_key(path: Path) -> str:
    """The first key of a key file (one per line, # comments). Raises UsageError when there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"cannot read the API key file {path}: {reason}", fix="give a file you may read") from None
    for line in lines:
        if line and not line.startswith("#"):
            return check_api_key(line, f"the API key file {path}")
    raise UsageError(f"the API key file {path} holds no key", fix="write one key per line into it")


def check_api_key(key: str, where: str) -> str:
    """The key. Raises UsageError, without it, for one that no header can hold."""
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise UsageError(
            f"{where} has a key that no request can carry", fix="use letters, digits and signs of ASCII, without spaces"
        )
    return key
