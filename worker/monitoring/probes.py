"""The HTTP server for metrics and health checks."""

import errno
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Thread

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from worker.errors import CannotStart
from worker.monitoring.health import Health

logger = logging.getLogger("sluice.probes")

_TEXT = "text/plain; charset=utf-8"


@contextmanager
def answer_probes(port: int, registry: CollectorRegistry, health: Health) -> Iterator[None]:
    """Serve while the block runs, to every client that can reach this machine: answers contain no prompts and no ids.
    Raises `CannotStart` if the port cannot be opened."""
    handler = type("Handler", (_Handler,), {"registry": registry, "health": health})
    try:
        server = _Server(("", port), handler)
    except OSError as error:
        raise CannotStart(f"SLUICE_METRICS_PORT={port}: {_describe(error)}") from None
    with server:
        # `poll_interval`: seconds between two checks if the server must close.
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="probes")
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


class _Server(ThreadingTCPServer):
    """A plain TCP server: HTTPServer resolves this machine's name at start, which may take seconds."""

    allow_reuse_address = True  # a restarted worker can use its port at once
    daemon_threads = True  # a scrape does not delay the end of the process

    def handle_error(self, request: object, client_address: object) -> None:
        gone = isinstance(sys.exc_info()[1], ConnectionError | TimeoutError)
        logger.log(logging.DEBUG if gone else logging.WARNING, "a probe was not answered", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    registry: CollectorRegistry
    health: Health
    timeout = 10.0  # a connection without a request does not keep a thread

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                # As OpenMetrics, which Prometheus asks for, prometheus_client 0.26 writes `_` for the `:` of a name.
                self._send(200, CONTENT_TYPE_LATEST, generate_latest(self.registry))
            case "/healthz":
                self._send_health(self.health.alive())
            case "/readyz":
                self._send_health(self.health.ready())
            case _:
                self._send(404, _TEXT, b"Not found; use /metrics, /healthz or /readyz.\n")

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Log no request: a probe comes every few seconds."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send errors as plain text instead of the library's HTML, in particular for methods without a `do_...`."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._send(405, _TEXT, b"Method not allowed; use GET or HEAD.\n", allow="GET, HEAD")
            self._drop_body()
        else:
            self._send(code, _TEXT, f"{message or HTTPStatus(code).phrase}\n".encode("ascii", "replace"))

    def _drop_body(self) -> None:
        """Read the body: a connection that is closed with unread bytes is reset, and the answer may be lost."""
        length = self.headers.get("Content-Length", "")
        if length.isascii() and length.isdecimal() and len(length) < 10:
            self.rfile.read(min(int(length), 65_536))  # the answer to a longer one may be lost

    def _send_health(self, parts: dict[str, str]) -> None:
        well = all(state == "ok" for state in parts.values())
        body = json.dumps({"status": "ok" if well else "unavailable", **parts}) + "\n"
        self._send(200 if well else 503, "application/json", body.encode())

    def _send(self, status: int, content_type: str, body: bytes, *, allow: str = "") -> None:
        self.send_response(status)
        if allow:
            self.send_header("Allow", allow)
        self.send_header("Content-Type", content_type)
        if body:
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _describe(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; set another one for each worker of this machine."
    return f"the port cannot be opened: {error.strerror}."
