"""Find a file on the package index and download it so that an interruption costs nothing.

A download goes to ``<sha256 prefix>-<name>.part`` in the cache and gets its name only after its hash is verified, so a
cached file is always right, and a part never belongs to another version.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import platformdirs
import pypi_simple
import requests

from llama_phase.errors import SourceError

ATTEMPTS = 4
TIMEOUT_S = 60.0  # without a byte, not in all
OFFLINE_FIX = (
    "check the network (PIP_INDEX_URL, PIP_CERT and HTTPS_PROXY are honoured), or download the file elsewhere and set "
    "LLAMA_PHASE_SDIST to its path"
)


def cache_folder() -> Path:
    return Path(platformdirs.user_cache_dir("llama-phase")) / "downloads"


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def pip_setting(name: str, environ: Mapping[str, str]) -> str:
    """A setting such as ``index-url`` as pip would see it: PIP_INDEX_URL, else pip's configuration, else empty."""
    return environ.get("PIP_" + name.upper().replace("-", "_")) or _pip_configuration().get(f"global.{name}", "")


@functools.cache
def _pip_configuration() -> dict[str, str]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=30, check=False
        )
        return dict(re.findall(r"^([\w.-]+)='(.*)'$", done.stdout, re.MULTILINE))
    return {}


def index_file(project: str, version: str, environ: Mapping[str, str], *, file_name: str = "") -> tuple[str, str, str]:
    """(file name, URL, sha256 the index states or "") of a project's source archive. Raises SourceError."""
    endpoint = pip_setting("index-url", environ) or pypi_simple.PYPI_SIMPLE_ENDPOINT
    session = requests.Session()
    session.verify = pip_setting("cert", environ) or True
    try:
        with pypi_simple.PyPISimple(endpoint, session=session) as index:
            page = index.get_project_page(project, timeout=TIMEOUT_S)
    except (requests.RequestException, pypi_simple.NoSuchProjectError, OSError) as error:
        raise SourceError(f"the package index does not answer for {project}: {error}", fix=OFFLINE_FIX) from None
    for package in page.packages:
        if package.version == version and package.package_type == "sdist" and file_name in ("", package.filename):
            return package.filename, package.url, package.digests.get("sha256", "")
    raise SourceError(
        f"the package index has no source archive {file_name or project} of version {version}",
        fix="check name and version in llama.cpp.lock, or use `--source git`",
    )


def fetch(
    url: str,
    name: str,
    sha256: str,
    *,
    folder: Path,
    environ: Mapping[str, str],
    progress: Callable[[int, int], None] = lambda done, total: None,
    pause: Callable[[float], None] = time.sleep,
) -> Path:
    """Download ``url`` to ``folder/name``, resuming an earlier part; ``progress(bytes done, bytes in all or 0)``.

    Raises SourceError: no answer (the part stays), or a wrong hash (the part is removed).
    """
    target = folder / name
    if target.is_file() and sha256_file(target) == sha256:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{sha256[:12]}-{name}.part"
        for attempt in range(1, ATTEMPTS + 1):
            try:
                _download(url, part, environ, progress)
                break
            except httpx.HTTPError as error:
                fatal = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
                if fatal or attempt == ATTEMPTS:
                    kept = f" ({part.stat().st_size >> 20} MiB are kept and will be resumed)" if part.exists() else ""
                    raise SourceError(
                        f"download of {name} failed: {error or type(error).__name__}{kept}",
                        fix="run the same command again; otherwise " + OFFLINE_FIX,
                    ) from None
                pause(2.0**attempt)
        verify(part, sha256, name, remove=True)
        os.replace(part, target)
    except OSError as error:
        raise SourceError(
            f"cannot write the download to {folder}: {error.strerror}",
            fix="free some disk space, or set XDG_CACHE_HOME to another disk",
        ) from error
    return target


def _download(url: str, part: Path, environ: Mapping[str, str], progress: Callable[[int, int], None]) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    certificates = environ.get("SSL_CERT_FILE") or pip_setting("cert", environ)
    context = ssl.create_default_context(cafile=certificates) if certificates else True
    with (
        httpx.Client(follow_redirects=True, timeout=TIMEOUT_S, verify=context) as client,
        client.stream("GET", url, headers=headers) as response,
    ):
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # the part is complete, or wrong: the hash tells
        response.raise_for_status()
        if not (
            response.status_code == httpx.codes.PARTIAL_CONTENT
            and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        ):
            have = 0
        length = response.headers.get("Content-Length", "")
        total = have + int(length) if length.isdigit() else 0
        with part.open("r+b" if have else "wb") as file:
            file.seek(have)
            for chunk in response.iter_raw():
                file.write(chunk)
                have += len(chunk)
                progress(have, total)


def verify(path: Path, sha256: str, name: str, *, remove: bool) -> None:
    """Raise SourceError naming both hashes unless ``path`` has the expected one; ``remove`` deletes a wrong file."""
    actual = sha256_file(path)
    if actual == sha256:
        return
    if remove:
        path.unlink()
    raise SourceError(
        f"{name} has the wrong hash: expected sha256 {sha256}, got {actual}",
        fix="nothing was unpacked; try again, and if it repeats do not use this mirror",
    )
