"""An OpenAI server for tests: it resets, refuses or streams."""

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PIECES: list[dict[str, Any]] = [{"content": ""}, {"content": "one two"}, {"reasoning": "three"}]
USAGE = {"completion_tokens": 3, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}


@dataclass
class Stub:
    """How a server behaves, and what it has got."""

    together: threading.Barrier  # requests are answered when as many are waiting
    to_reset: int = 0  # first connections that are reset
    status: int = 200
    broken: bool = False  # the stream ends in the middle of a piece
    url: str = ""
    bodies: list[Any] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    stub: Stub

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "the-model"}]}).encode())

    def do_POST(self) -> None:
        stub = self.stub
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if stub.to_reset > 0:
            stub.to_reset -= 1
            reset = struct.pack("ii", 1, 0)  # with no time to linger, closing a socket resets its connection
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            self.connection.close()
            return
        stub.together.wait(10)
        stub.bodies.append(body)
        if stub.status != 200:
            self._send(stub.status, b"no room")
            return
        events = [json.dumps({"choices": [{"delta": piece}]}) for piece in PIECES]
        events += [json.dumps({"choices": [], "usage": USAGE}), "[DONE]"]
        stream = "".join(f"data: {event}\n\n" for event in events).encode()
        if stub.broken:
            self.send_response(200)
            self.send_header("Content-Length", "10000")
            self.end_headers()
            self.wfile.write(stream[:140])
            return
        self._send(200, stream)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def stub_server(*, together: int = 1, to_reset: int = 0, status: int = 200, broken: bool = False) -> Iterator[Stub]:
    stub = Stub(threading.Barrier(together), to_reset, status, broken)
    handler = type("Handler", (_Handler,), {"stub": stub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket.listen(128)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stub.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        yield stub
        server.shutdown()
