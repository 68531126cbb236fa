"""Serves the example with the server of SLUICE_REDIS_URL, or with its own server and worker."""

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import uvicorn

from examples.web.app import create_app
from scripts.stack import Server, WorkerProcess, embedded_binary


class WebServer(uvicorn.Server):
    """A uvicorn server that stops quietly."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server without a traceback for each open stream."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        super().handle_exit(sig, frame)


@contextmanager
def own_stack() -> Iterator[str]:
    """Start a server and a worker with the tiny model, yield the URL, and stop both at the end."""
    with ExitStack() as running:
        server = Server(embedded_binary())
        running.callback(server.stop)
        server.start()
        worker = WorkerProcess(server.url, grace_s=1)  # its chats end with this page
        running.callback(worker.stop)
        print("loading models/tiny-chat ...", flush=True)
        worker.start()
        yield server.url


def serve(listening: socket.socket, options: argparse.Namespace) -> None:
    """Serve the page on an open socket until a signal arrives."""
    with ExitStack() as running:
        url = os.environ.get("SLUICE_REDIS_URL") or running.enter_context(own_stack())
        app = create_app(url, model=options.model)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        print(f"The chat is at http://127.0.0.1:{listening.getsockname()[1]}/  (Ctrl-C ends it)", flush=True)
        WebServer(config).run(sockets=[listening])


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="examples/web/run", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes any free port")
    parser.add_argument("--model", default="default", help="the served name of the model; default: default")
    return parser.parse_args()


def main() -> int:
    """Run the example, and return the exit code."""
    options = read_options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))  # the terminal was closed
    try:
        listening = socket.create_server(("127.0.0.1", options.port))
    except (OSError, OverflowError):
        print(f"sluice: port {options.port} is in use or not permitted; choose another with --port.", file=sys.stderr)
        return 1
    try:
        serve(listening, options)
    except RuntimeError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    print("stopped, with all processes that it started")
    return 0


if __name__ == "__main__":
    sys.exit(main())
