"""Serves the example on the server of SLUICE_REDIS_URL, or else on a server and a worker of its own."""

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
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The streams that are open are cut, and uvicorn would print a traceback for each."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        super().handle_exit(sig, frame)


@contextmanager
def own_stack() -> Iterator[str]:
    """A server and a worker with the tiny model, both gone at the end whatever happens."""
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
    with ExitStack() as running:
        url = os.environ.get("SLUICE_REDIS_URL") or running.enter_context(own_stack())
        app = create_app(url, model=options.model, leave_s=options.leave_s)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        print(f"The chat is at http://127.0.0.1:{listening.getsockname()[1]}/  (Ctrl-C ends it)", flush=True)
        WebServer(config).run(sockets=[listening])


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="examples/web/run", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes any that is free")
    parser.add_argument("--model", default="default", help="the name that the workers serve; default: default")
    parser.add_argument("--leave-s", type=float, default=5.0, help="seconds for a browser to come back; default: 5")
    return parser.parse_args()


def main() -> int:
    options = read_options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))  # the terminal was closed
    try:
        listening = socket.create_server(("127.0.0.1", options.port))
    except (OSError, OverflowError):
        print(f"sluice: port {options.port} is taken or not ours; choose another with --port.", file=sys.stderr)
        return 1
    try:
        serve(listening, options)
    except RuntimeError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    print("stopped, and everything that was started with it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
