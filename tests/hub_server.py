"""A hub on this machine for tests: serves folders as repositories, and takes uploads. Standard library only.

The client finds it with the variables of `Hub.variables`. Repositories are ROOT/models/OWNER/NAME and
ROOT/datasets/OWNER/NAME; each has one commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef" * 2 + "01234567"
USER = "somebody"
KINDS = ("models", "datasets")


class Hub:
    """The server, in a thread. `requests` are (method, path, whole) of all requests so far. `whole` is False for a
    part of a file."""

    def __init__(self, root: Path):
        self.root = root
        self.requests: list[tuple[str, str, bool]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, root, self.requests))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def variables(self, home: Path) -> dict[str, str]:
        """Return the environment of a client with a cache in `home`, which is logged in."""
        address = f"http://127.0.0.1:{self.server.server_port}"
        return {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_TOKEN": "hf_a_token"}

    def downloads(self) -> list[str]:
        """Return the names of the files that were downloaded as a whole, and forget all requests."""
        found = [path for method, path, whole in self.requests if method == "GET" and "/resolve/" in path and whole]
        self.requests.clear()
        return [path.rpartition("/")[2] for path in found]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, root: Path, requests: list[tuple[str, str, bool]], *connection):
        self.root = root
        self.requests = requests
        super().__init__(*connection)  # answers the requests of the connection

    def log_message(self, *_) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.requests.append((self.command, url.path, "Range" not in self.headers))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        first, *parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if first == "api":
            self.answer(parts, parse_qs(url.query), body)
        elif first == "datasets":
            self.send_file(self.root / "datasets", parts)
        else:
            self.send_file(self.root / "models", [first, *parts])

    do_HEAD = do_POST = do_GET

    def answer(self, parts: list[str], query: dict[str, list[str]], body: bytes) -> None:
        """Answer a request of the API: whoami-v2, repos/create, or KIND/OWNER/NAME/ACTION/REVISION/PATH."""
        if parts == ["whoami-v2"]:
            token = {"accessToken": {"role": "write"}}
            return self.send({"type": "user", "name": USER, "orgs": [], "auth": token})
        if parts == ["validate-yaml"]:
            return self.send({"errors": [], "warnings": []})
        if parts == ["repos", "create"]:
            asked = json.loads(body)
            name = f"{asked.get('organization') or USER}/{asked['name']}"
            (self.root / "models" / name).mkdir(parents=True)
            return self.send({"url": f"http://{self.headers['Host']}/{name}"})
        folder = self.root.joinpath(*parts[:3])
        if parts[0] not in KINDS or len(parts) < 3 or not folder.is_dir():
            return self.missing("RepoNotFound")
        action, _, *rest = [*parts[3:], "", ""]
        path = "/".join(filter(None, rest))
        if action in ("", "revision"):
            return self.send(self.info(folder, "/".join(parts[1:3])))
        if action == "tree":
            under = folder / path
            recursive = query.get("recursive", [""])[0].lower() in ("true", "1")
            found = under.rglob("*") if recursive else under.glob("*")
            return self.send([entry(folder, one) for one in sorted(found)])
        if action == "paths-info":
            asked = json.loads(body) if body.startswith(b"{") else parse_qs(body.decode())
            return self.send([entry(folder, one) for p in asked["paths"] if (one := folder / p).exists()])
        if action == "preupload":
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            return self.send({"files": [{**one, "shouldIgnore": False} for one in files]})
        if action == "commit":
            return self.commit(folder, "/".join(parts[1:3]), body)
        return self.missing("EntryNotFound")

    def info(self, folder: Path, name: str) -> dict[str, Any]:
        files = [one for one in sorted(folder.rglob("*")) if one.is_file()]
        siblings = [{"rfilename": one.relative_to(folder).as_posix(), "size": one.stat().st_size} for one in files]
        return {"_id": name, "id": name, "sha": COMMIT, "gated": False, "private": False, "siblings": siblings}

    def commit(self, folder: Path, name: str, body: bytes) -> None:
        """Write and delete the files of a commit: one JSON object per line."""
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                file = folder / line["value"]["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(base64.b64decode(line["value"]["content"]))
            elif line["key"] == "deletedFile":
                (folder / line["value"]["path"]).unlink()
        self.send({"commitOid": COMMIT, "commitUrl": f"http://{self.headers['Host']}/{name}/commit/{COMMIT}"})

    def send_file(self, kind: Path, parts: list[str]) -> None:
        """Send OWNER/NAME/resolve/REVISION/PATH, or the bytes that the header Range selects."""
        if len(parts) < 5 or not kind.joinpath(*parts[:2]).is_dir():
            return self.missing("RepoNotFound")
        file = kind.joinpath(*parts[:2], *parts[4:])
        if not file.is_file():
            return self.missing("EntryNotFound")
        content = file.read_bytes()
        size = len(content)
        headers = {"ETag": f'"{digest(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range", "").removeprefix("bytes=")
        if asked:
            start, _, end = asked.partition("-")
            last = min(int(end or size), size - 1)
            content = content[int(start) : last + 1]
            headers["Content-Range"] = f"bytes {start}-{last}/{size}"
        self.send_bytes(content, 206 if asked else 200, headers)

    def missing(self, what: str) -> None:
        headers = {"X-Error-Code": what, "X-Error-Message": what, "X-Repo-Commit": COMMIT}
        self.send_bytes(b"{}", 404, headers)

    def send(self, answer: Any) -> None:
        self.send_bytes(json.dumps(answer).encode(), 200, {"Content-Type": "application/json"})

    def send_bytes(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def digest(content: bytes) -> str:
    """Return git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(folder: Path, path: Path) -> dict[str, Any]:
    """Return what the hub lists about a file or a folder of a repository."""
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
    content = path.read_bytes()
    return {"type": "file", "path": name, "oid": digest(content), "size": len(content)}
