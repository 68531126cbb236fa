"""A receiver of webhooks on this machine, of the standard library alone: checks of SDKs run where nothing else is."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Received = queue.Queue[tuple[bytes, dict[str, str]]]  # bodies and headers


@contextmanager
def receiver(port: int) -> Iterator[Received]:
    """Receive webhooks until the end of the block."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.put((body, dict(self.headers)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass  # stdout is the report of checks

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
