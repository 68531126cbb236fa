"""The benchmark of many chats at once: its requests, its figures, and its errors."""

import argparse
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import isnan
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import mlx_lm
import pytest

from scripts.benchmarks import burst
from scripts.benchmarks.chats import WORDS, Answer, Figures, Prompts, through_http, through_queue
from scripts.stack import ROOT, WorkerProcess


def test_a_burst_is_judged_by_its_slowest_answers() -> None:
    answers = [Answer(3, (1.0, 1.5, 2.0)), Answer(2, (2.0, 5.0)), Answer(1, (3.0,))]
    assert Figures.of(answers) == Figures(
        tokens_per_s=6 / 5, first_median_s=2.0, first_last_s=3.0, longest_gap_s=3.0, all_streaming_s=ANY
    )


def test_the_median_of_rounds_is_taken_figure_by_figure() -> None:
    rounds = [Figures(1, 20, 300, 4, 9), Figures(2, 10, 200, 6, 7), Figures(3, 30, 100, 5, 8)]
    assert Figures.median(rounds) == Figures(2, 20, 200, 5, 8)


def test_a_decode_step_is_the_gap_while_all_chats_stream() -> None:
    answers = [Answer(5, (0.0, 4.0, 8.0, 9.0, 11.0)), Answer(4, (3.0, 8.5, 9.5, 10.0)), Answer(1, (20.0,))]
    assert Figures.of(answers[:2]).all_streaming_s == 1.0
    assert isnan(Figures.of(answers).all_streaming_s)


def test_no_two_prompts_begin_with_the_same_word() -> None:
    prompts = Prompts()
    texts = [*prompts.draw(300), *prompts.draw(300)]
    assert len({text.split()[0] for text in texts}) == 600


def test_prompts_have_5_to_60_words() -> None:
    lengths = {len(text.split()) for text in Prompts().draw(2000)}
    assert (min(lengths), max(lengths)) == WORDS


async def test_chats_through_the_queue_all_count_their_tokens(worker: WorkerProcess, redis_url: str) -> None:
    answers = await through_queue(redis_url, "default", Prompts().draw(4), tokens=3)
    assert len(answers) == 4
    for answer in answers:
        assert 1 <= answer.tokens <= 3
        assert list(answer.arrivals) == sorted(answer.arrivals)


# An OpenAI server


class Stub(BaseHTTPRequestHandler):
    """Resets the first connections, then streams two pieces with three tokens in all."""

    to_reset = 0
    together: threading.Barrier
    bodies: list[Any]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if type(self).to_reset > 0:
            type(self).to_reset -= 1
            reset = struct.pack("ii", 1, 0)  # with no time to linger, closing a socket resets its connection
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            self.connection.close()
            return
        self.together.wait(10)
        self.bodies.append(body)
        self.send_response(200)
        self.end_headers()
        for event in self.events():
            self.wfile.write(f"data: {event}\n\n".encode())

    def events(self) -> list[str]:
        pieces: list[dict[str, Any]] = [{"content": ""}, {"content": "one two"}, {"reasoning": "three"}]
        deltas = [{"choices": [{"delta": piece}]} for piece in pieces]
        return [*map(json.dumps, deltas), json.dumps({"choices": [], "usage": {"completion_tokens": 3}}), "[DONE]"]

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def stub(*, chats: int, to_reset: int = 0) -> Iterator[tuple[int, list[Any]]]:
    """Answers when `chats` requests are waiting."""
    together, bodies = threading.Barrier(chats), list[Any]()
    handler = type("Handler", (Stub,), {"to_reset": to_reset, "together": together, "bodies": bodies})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], bodies
        server.shutdown()


def test_all_chats_are_with_the_server_at_once() -> None:
    with stub(chats=40) as (port, bodies):
        answers = through_http(port, [f"text {i}" for i in range(40)], tokens=3)
    assert sorted(body["messages"][0]["content"] for body in bodies) == sorted(f"text {i}" for i in range(40))
    assert [(answer.tokens, len(answer.arrivals)) for answer in answers] == [(3, 2)] * 40


def test_a_reset_connection_is_tried_again() -> None:
    with stub(chats=1, to_reset=2) as (port, bodies):
        [answer] = through_http(port, ["text"], tokens=3)
    assert (answer.tokens, len(bodies)) == (3, 1)


# Options


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    burst.add_options(parser)
    return parser.parse_args(given)


def test_a_baseline_has_to_be_a_checkout(tmp_path: Path) -> None:
    assert options("--baseline", str(ROOT)).baseline == ROOT
    with pytest.raises(argparse.ArgumentError):
        options("--baseline", str(tmp_path))


@pytest.mark.parametrize("given", ["0", "-1", "many"])
def test_a_number_of_chats_is_at_least_one(given: str) -> None:
    with pytest.raises(argparse.ArgumentError):
        options(f"--chats={given}")


def test_a_worker_runs_the_code_of_the_checkout_that_it_is_given(redis_url: str, tmp_path: Path) -> None:
    for package in ("worker", "schemas", "sluice"):
        (tmp_path / package).symlink_to(ROOT / package)
    (tmp_path / "elsewhere.py").write_text("print('from elsewhere')")
    process = WorkerProcess(redis_url, module="elsewhere", root=tmp_path).start(wait=False)
    try:
        assert process.wait() == 0
        assert "from elsewhere" in process.log()
    finally:
        process.stop()


@pytest.mark.parametrize("make", burst.MODELS.values())
def test_the_models_of_the_bench_answer_as_long_as_they_may(make: Any, tmp_path: Path) -> None:
    network, tokenizer = mlx_lm.load(str(make(tmp_path)))[:2]
    said = list(mlx_lm.stream_generate(network, tokenizer, [10, 11, 12], max_tokens=8))
    assert len(said) == 8
    assert said[-1].finish_reason == "length"


def test_ended_answers_are_no_figures() -> None:
    with pytest.raises(RuntimeError):
        burst._figures([Answer(burst.TOKENS, (1.0,)), Answer(burst.TOKENS - 1, (1.0,))])
