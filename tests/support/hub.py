"""A model hub for tests: the routes of Hugging Face's that `huggingface_hub` asks for, over the files of a folder."""

import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SHA = "8f3e0d5c1b2a49e7a6c0d9f4b8e2a1c3d5e7f901"  # of the only commit


@dataclass
class Hub:
    """What a hub has, how it behaves, and what it was asked."""

    models: dict[str, Path] = field(default_factory=dict)  # folders by id
    gated: set[str] = field(default_factory=set)
    status: int = 0  # that every request is answered with; 0: none
    cuts: int = 0  # bodies of weights that are broken off after `cut_bytes`
    cut_bytes: int = 0
    reset: bool = False  # the connection of a cut is reset, else closed
    missing: set[str] = field(default_factory=set)  # files that are listed and not found
    extra_bytes: int = 0  # that weights are said to have beyond those of the file
    url: str = ""
    ranges: list[str] = field(default_factory=list)  # the `Range` of each body of weights, "" for the whole


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        if hub.status:
            return self._json({"error": "out of order"}, status=hub.status)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+).*", path):
            return self._api(found[1], found[2], found[3])
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(found[1], found[3])
        self._json({"error": "no such route"}, status=404)

    def _api(self, name: str, what: str, revision: str) -> None:
        if name not in self.hub.models:
            return self._json({"error": "Repository not found"}, status=401, code="RepoNotFound")
        if revision not in ("main", SHA):
            return self._json({"error": "Revision not found"}, status=404, code="RevisionNotFound")
        if what == "revision":
            return self._json({"id": name, "sha": SHA, "siblings": []})
        folder = self.hub.models[name]
        self._json([self._entry(folder, file) for file in sorted(folder.rglob("*")) if file.is_file()])

    def _entry(self, folder: Path, file: Path) -> dict[str, Any]:
        size = file.stat().st_size + self.hub.extra_bytes * (file.suffix == ".safetensors")
        path = str(file.relative_to(folder))
        entry: dict[str, Any] = {"type": "file", "path": path, "size": size, "oid": _etag(file)}
        if file.suffix == ".safetensors":
            entry["lfs"] = {"oid": _etag(file), "size": size, "pointerSize": 134}
        return entry

    def _file(self, name: str, file_name: str) -> None:
        hub = self.hub
        if name in hub.gated:
            return self._json({"error": "Access to the model is restricted"}, status=403, code="GatedRepo")
        file = hub.models[name] / file_name
        if file_name in hub.missing and self.command == "GET":
            return self._json({"error": "Entry not found"}, status=404, code="EntryNotFound")
        content, wanted = file.read_bytes(), self.headers.get("Range", "")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        is_weights = file.suffix == ".safetensors"
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{_etag(file)}"')
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start + hub.extra_bytes * is_weights))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_weights:
            hub.ranges.append(wanted)
            if hub.cuts and len(content) - start > hub.cut_bytes:
                hub.cuts -= 1
                self.wfile.write(content[start : start + hub.cut_bytes])
                return self._cut()
        self.wfile.write(content[start:])

    def _cut(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        if self.hub.reset:
            time.sleep(0.5)  # a reset drops what the client has not read yet
            # Without time to linger, closing a socket resets its connection.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def _json(self, body: Any, *, status: int = 200, code: str = "") -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", body["error"])
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def serving_hub(**models: Path) -> Iterator[Hub]:
    """Serve models of the organization `tests` until the end of the block."""
    hub = Hub({f"tests/{name}": folder for name, folder in models.items()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
