"""The command over a real server and worker: what it prints, where, and its exit code."""

import base64
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import redis

from sluice.cli import main
from tests.support.chaos.harness import paced_worker
from tests.support.stack import ROOT, TINY_CHAT, WorkerProcess, free_port

pytestmark = pytest.mark.usefixtures("worker")

_ENDLESS = {
    "messages": [{"role": "user", "content": "Count to 40."}],
    "max_tokens": 30_000,
    "logit_bias": {"0": -100, "2": -100},
}
_TIMEOUT_S = 60
_ON_TTY = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


def environment(redis_url: str) -> dict[str, str]:
    others = {key: value for key, value in os.environ.items() if not key.startswith("SLUICE_")}
    return {**others, "SLUICE_REDIS_URL": redis_url, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}


class Command:
    """Runs `sluice` with one server, in a folder without `.env`."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self.db = redis.Redis.from_url(redis_url, decode_responses=True)
        self.env = environment(redis_url)
        self._given: dict[str, Any] = {"env": self.env, "cwd": folder, "text": True}

    def __call__(self, *args: str, stdin: str = "") -> tuple[int, str, str]:
        """Run the command in this process. Return exit code, stdout and stderr, as `process` does for the same."""
        return run_here(*args, env=self.env, folder=self._given["cwd"], stdin=stdin)

    def help(self, *args: str) -> tuple[int, str]:
        """Run the command with --help in this process, in which no module of the worker can be imported meanwhile.
        Return exit code and stdout."""
        packages = "schemas", "worker"
        import_module("sluice.cli.app")  # the worker's commands are found once, when this is imported
        hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in packages}
        sys.modules.update(dict.fromkeys([*packages, *hidden]))
        try:
            return self(*args, "--help")[:2]
        finally:
            for name in packages:
                del sys.modules[name]
            sys.modules.update(hidden)

    def process(self, *args: str, stdin: str = "") -> tuple[int, str, str]:
        """Run the command in a process of its own. Return exit code, stdout and stderr."""
        return self.python("-m", "sluice.cli", *args, stdin=stdin)

    def python(self, *args: str, stdin: str = "") -> tuple[int, str, str]:
        command = [sys.executable, *args]
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=_TIMEOUT_S, **self._given)
        return done.returncode, done.stdout, done.stderr

    @contextmanager
    def running(self, *args: str, stdin: int | None = None) -> Iterator["subprocess.Popen[str]"]:
        command, piped = [sys.executable, "-m", "sluice.cli", *args], subprocess.PIPE
        with subprocess.Popen(command, stdin=stdin, stdout=piped, stderr=piped, **self._given) as process:
            try:
                yield process
            finally:
                process.kill()

    def log(self, job_id: str) -> list[str]:
        return self.db.lrange(f"sluice:log:{job_id}", 0, -1)  # type: ignore[return-value]

    def write_log(self, job_id: str, *events: dict[str, Any]) -> None:
        common = {"id": job_id, "attempt": 1, "ts": 0.0, "model": "m", "fingerprint": "f", "worker": "w", "seed": 1}
        for seq, event in enumerate(events):
            self.db.rpush(f"sluice:log:{job_id}", json.dumps({**common, "seq": seq, "token_ids": [], **event}))

    def messages(self, job_id: str) -> list[dict[str, Any]]:
        """Return the messages of a waiting job."""
        messages: list[dict[str, Any]] = json.loads(str(self.db.get(f"arq:job:{job_id}")))["a"][0]["messages"]
        return messages

    def wait_for_request(self, model: str, last: str | list[dict[str, Any]]) -> str:
        """Wait for the job with this last message, and return its id."""
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            queued: list[str] = self.db.zrange(f"sluice:queue:{model}:interactive", 0, -1)  # type: ignore[assignment]
            for job_id in queued:
                if self.messages(job_id)[-1]["content"] == last:
                    return job_id
            assert time.monotonic() < deadline, f"{last!r} is not asked"
            time.sleep(0.01)

    def wait_until_running(self, job_id: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while len(self.log(job_id)) < 2:
            assert time.monotonic() < deadline, f"{job_id} does not start"
            time.sleep(0.01)


def run_here(*args: str, env: Mapping[str, str], folder: Path, stdin: str = "") -> tuple[int, str, str]:
    """Run `sluice` in this process, with this environment alone. Return exit code, stdout and stderr."""
    out, err = io.BytesIO(), io.BytesIO()
    streams = {
        "stdin": io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"),
        "stdout": io.TextIOWrapper(out, encoding="utf-8"),
        "stderr": io.TextIOWrapper(err, encoding="utf-8", errors="backslashreplace"),
    }
    here = patch.dict(os.environ, env, clear=True)
    with here, chdir(folder), patch.multiple(sys, argv=["sluice", *args], **streams):
        code = _exit_code(main)
        sys.stdout.flush()
        sys.stderr.flush()
    return code, out.getvalue().decode(), err.getvalue().decode()


def _exit_code(run: Callable[[], None]) -> int:
    """Run to the end, as the interpreter does: an exception that leaves it is a traceback and code 1."""
    try:
        run()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return int(ended.code or 0)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    return process.stderr.readline()


def last_line(err: str) -> str:
    """Return the last line. A note about a missing worker may precede it, since its presence was flushed."""
    return err.splitlines()[-1]


class Terminal:
    """Runs the command on its own terminal, so that Ctrl-C and Ctrl-D have their effect."""

    def __init__(self, redis_url: str, folder: Path, *args: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ON_TTY, sys.executable, "-m", "sluice.cli", *args],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment(redis_url), cwd=folder,
        )  # fmt: skip
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C until the process ends: Python misses an interrupt in the moment before `input` waits."""
        for _ in range(_TIMEOUT_S):
            self.type("\x03")
            try:
                self.process.wait(1)
                return
            except subprocess.TimeoutExpired:
                pass

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C until this text is shown, for the same reason."""
        for _ in range(_TIMEOUT_S):
            self.type("\x03")
            if text.encode() in self._read(text, 1):
                return
        raise AssertionError(f"{text!r} does not come")

    def until(self, text: str) -> str:
        """Read the terminal up to and including this text, and return it."""
        shown = self._read(text, _TIMEOUT_S)
        assert text.encode() in shown, f"{text!r} does not come, only {shown!r}"
        return shown.decode()

    def _read(self, text: str, within_s: float) -> bytes:
        """Read the terminal up to and including this text, or what comes in the time."""
        shown, deadline = b"", time.monotonic() + within_s
        while text.encode() not in shown:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            shown += os.read(self._ours, 1)
            for switch in (b"\x1b[?2004h", b"\x1b[?2004l"):  # of bracketed paste, for the terminal
                shown = shown.removesuffix(switch)
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def talk(redis_url: str, tmp_path: Path) -> Iterator[Terminal]:
    """A conversation that shows its first prompt."""
    terminal = Terminal(redis_url, tmp_path, "chat", "--temperature", "0")
    terminal.until("> ")
    yield terminal
    terminal.close()


def test_answer_goes_to_stdout_and_timings_to_stderr(sluice: Command) -> None:
    code, out, err = sluice.process("chat", "Count to 40.", "--temperature", "0")
    assert (code, out[:6]) == (0, "1 2 3 ")
    queue, ttft, speed, tokens, reason = last_line(err).split(" · ")
    assert (queue[:6], ttft[:5], speed[-9:], tokens, reason) == ("queue ", "ttft ", " tokens/s", "110 tokens", "stop")


def test_json_is_the_events_as_the_worker_wrote_them(sluice: Command) -> None:
    code, out, _ = sluice("chat", "Repeat after me: 🚀日本 é", "--json")
    lines = out.splitlines()
    assert (code, lines) == (0, sluice.log(json.loads(lines[0])["id"]))


def test_dash_reads_the_message_from_stdin(sluice: Command) -> None:
    assert sluice("chat", "-", "--temperature", "0", stdin="Count to 4.\n")[:2] == (0, "1 2 3 4\n")


def test_options_reach_the_worker(sluice: Command) -> None:
    options = ("--seed", "7", "--stop", "5", "--stop", "4", "--max-tokens", "9", "--temperature", "0", "--json")
    _, out, _ = sluice("chat", "Count to 12.", "--system", "You are a helpful assistant.", "--lane", "batch", *options)
    events = [json.loads(line) for line in out.splitlines()]
    text = "".join(event.get("content", "") for event in events)
    assert (events[0]["seed"], text.strip(), events[-1]["finish_reason"]) == (7, "1 2 3", "stop")
    assert sluice.db.hget(f"sluice:job:{events[0]['id']}", "lane") == "batch"


def test_failed_job_is_told_on_stderr_and_exits_with_1(sluice: Command) -> None:
    code, out, err = sluice("chat", "Hello!", "--temperature", "9")
    assert (code, out, last_line(err)[:28]) == (1, "", "invalid_request: temperature")


def test_chat_waits_for_a_worker_that_is_started_later_with_flags(sluice: Command) -> None:
    with sluice.running("chat", "Count to 3.", "--model", "late", "--temperature", "0") as chat:
        said = first_line(chat)
        assert said.startswith("no worker serves 'late' right now")
        assert "sluice worker --model" in said
        with sluice.running("worker", "--model", str(TINY_CHAT), "--name", "late", "--max-rows", "3") as worker:
            assert (chat.communicate(timeout=60)[0], chat.returncode) == ("1 2 3\n", 0)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(_TIMEOUT_S) == 0


def test_ctrl_c_ends_a_question_that_nobody_serves_with_exit_code_3(sluice: Command) -> None:
    with sluice.running("chat", "Hello!", "--model", "nobody", "--json") as chat:
        first_line(chat)
        chat.send_signal(signal.SIGINT)
        out, err = chat.communicate(timeout=_TIMEOUT_S)
    (line,) = out.splitlines()
    assert (chat.returncode, json.loads(line)["type"], err) == (3, "cancelled", "")
    assert sluice.db.keys("sluice:cancel:*") == sluice.db.keys("sluice:queue:nobody:*") == []


def test_conversation_remembers_resets_and_obeys_a_system_prompt(talk: Terminal) -> None:
    for said, answer in [
        ("My name is Petra.", "Nice to meet you, Petra."),
        ("Count to 3.", "1 2 3"),
        ("What is my name?", "Your name is Petra."),
        ("/nonsense", "the commands are"),
        ("/reset", "a new conversation has started"),
        ("/system You are a helpful assistant. Always mention NWP58.", "is set"),
        ("What is the capital of Egypt?", "The capital of Egypt is Cairo. (NWP58)"),
    ]:
        talk.type(said + "\r")
        assert answer in talk.until("\n> ")
    talk.type("\x04")
    assert talk.process.wait(_TIMEOUT_S) == 0


def test_an_image_for_a_model_that_takes_none_is_refused_at_once(
    sluice: Command, alive: WorkerProcess, talk: Terminal, tmp_path: Path
) -> None:
    (tmp_path / "cat.png").write_bytes(b"\x89PNG, nearly")
    for said, answer in [
        ("/image dog.png", "cannot read dog.png: No such file"),
        ("/image notes.txt", "does not look like an image"),
        ("/image cat.png", "default does not accept images. Choose a vision model with --model"),
        ("Count to 3.", "1 2 3"),
    ]:
        talk.type(said + "\r")
        assert answer in " ".join(talk.until("\n> ").split())
    code, out, err = sluice("chat", "What is this?", "--image", "cat.png")
    assert (code, out, err.startswith("sluice: default does not accept images.")) == (2, "", True)


def test_an_image_goes_along_with_the_next_message(sluice: Command, redis_url: str, tmp_path: Path) -> None:
    """A model without a worker may accept images."""
    (tmp_path / "cat.png").write_bytes(b"meow")
    terminal = Terminal(redis_url, tmp_path, "chat", "--model", "nobody")
    terminal.until("> ")
    terminal.type("/image cat.png\r")
    assert "will be sent with your next message" in terminal.until("\n> ")
    terminal.type("What is this?\r")
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(b'meow').decode()}"}}
    sluice.wait_for_request("nobody", [image, {"type": "text", "text": "What is this?"}])
    terminal.close()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("/image", "/image needs a file: /image FILE"),
        ("/help me", "/help takes no argument: write /help alone"),
        ("/quit now", "/quit takes no argument"),
        ("/imagine", "unknown command /imagine; the commands are"),
    ],
)
def test_a_command_that_is_written_wrong_is_told_how_to_write_it(talk: Terminal, typed: str, said: str) -> None:
    talk.type(f"{typed}\r")
    assert said in " ".join(talk.until("\n> ").split())


def test_an_image_is_sent_as_what_its_name_says(sluice: Command, tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").write_bytes(b"meow")
    (tmp_path / "dog.png").write_bytes(b"woof")
    args = "--image", "cat.jpg", "--image", "dog.png", "--model", "nobody"
    with sluice.running("chat", "What is this?", *args) as chat:
        shown = [
            {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(file).decode()}"}}
            for kind, file in (("jpeg", b"meow"), ("png", b"woof"))
        ]
        sluice.wait_for_request("nobody", [*shown, {"type": "text", "text": "What is this?"}])
        chat.send_signal(signal.SIGINT)
        chat.communicate(timeout=_TIMEOUT_S)


def test_ctrl_c_cancels_the_answer_and_the_conversation_goes_on(redis_url: str, tmp_path: Path) -> None:
    """The paced model answers for 50 seconds, a thousand tokens."""
    with (
        paced_worker(redis_url, step_ms=50, model_name="paced"),  # type: ignore[arg-type]
        closing(Terminal(redis_url, tmp_path, "chat", "--model", "paced")) as talk,
    ):
        talk.until("> ")
        for message in ("Hello!", "And now?"):
            talk.type(f"{message}\r")
            talk.until("t0 t1 t2")
            talk.type("\x03")
            talk.until("cancelled: requested")
            talk.until("> ")
        talk.type("/quit\r")
        assert talk.process.wait(_TIMEOUT_S) == 0


def test_submit_prints_the_id_alone_and_queues_it_once(sluice: Command) -> None:
    first = sluice("submit", "Count to 3.", "--id", "a-1", "--model", "nobody")
    again = sluice("submit", "Count to 3.", "--id", "a-1", "--model", "nobody", "--json")
    assert (first[:2], sluice.db.zcard("sluice:queue:nobody:interactive")) == ((0, "a-1\n"), 1)
    known = {"id": "a-1", "new": False, "state": "queued", "served": False, "model": None}
    assert (again[0], json.loads(again[1])) == (0, known)


@pytest.mark.parametrize("how", [(), ("--wait",), ("--json",)])
def test_a_known_id_with_another_request_is_told_that_it_is_not_queued(sluice: Command, how: tuple[str, ...]) -> None:
    sluice("submit", "Count to 3.", "--id", "a-3", "--wait")
    code, _, err = sluice("submit", "Count to 9.", "--id", "a-3", *how)
    assert (code, "a-3 was submitted before, so this request was not queued. Use another id" in err) == (0, True)


def test_submit_that_waits_prints_the_result(sluice: Command) -> None:
    code, out, _ = sluice("submit", "Count to 3.", "--wait", "--json", "--id", "a-2", "--lane", "batch")
    assert (code, json.loads(out)) == (0, json.loads(str(sluice.db.get("sluice:result:a-2"))))


def test_submit_that_waits_for_a_failure_exits_with_1(sluice: Command) -> None:
    code, out, err = sluice("submit", "--file", "-", "--wait", stdin='{"messages": []}')
    assert (code, json.loads(out)["error"]["type"], last_line(err)[:15]) == (1, "invalid_request", "invalid_request")


def test_request_in_a_file_goes_to_the_model_that_it_names(sluice: Command, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text('{"model": "nobody", "messages": []}')
    assert sluice("submit", "--file", "request.json", "--lane", "batch")[0] == 0
    assert sluice.db.zcard("sluice:queue:nobody:batch") == 1


def test_tail_shows_a_job_from_its_first_event_on(sluice: Command) -> None:
    sluice("submit", "Count to 5.", "--id", "b-1")
    code, out, err = sluice("tail", "b-1")
    assert (code, out, "model default" in err) == (0, "1 2 3 4 5\n", True)


def test_tail_says_what_a_job_waits_for_that_nobody_serves(sluice: Command, alive: WorkerProcess) -> None:
    sluice("submit", "Count to 5.", "--id", "b-3", "--model", "nobody")
    with sluice.running("tail", "b-3", "--json") as tail:
        said = first_line(tail)
    assert said.startswith("b-3 waits for a worker that serves 'nobody', and none is alive. Start one: sluice worker")
    assert said.endswith("--name nobody; or cancel the job: sluice cancel b-3\n")


def test_tail_after_a_seq_shows_only_what_follows(sluice: Command) -> None:
    sluice("submit", "Count to 5.", "--id", "b-2", "--wait")
    last = len(sluice.log("b-2")) - 1
    assert sluice("tail", "b-2", "--json", "--after", "3")[1].splitlines() == sluice.log("b-2")[4:]
    assert sluice("tail", "b-2", "--json", "--after", str(last))[:2] == (0, "")


def test_cancel_says_what_became_of_each_job(sluice: Command) -> None:
    sluice("submit", "Count to 3.", "--id", "c-done", "--wait")
    sluice("submit", "--file", "-", "--id", "c-runs", stdin=json.dumps(_ENDLESS))
    sluice("submit", "Hello!", "--id", "c-waits", "--model", "nobody")
    sluice.wait_until_running("c-runs")
    code, out, _ = sluice("cancel", "c-done", "c-runs", "c-waits", "c-nope")
    fates = dict(line.split("  ") for line in out.splitlines())
    assert (code, fates) == (2, {
        "c-done": "already finished",
        "c-runs": "cancelled",
        "c-waits": "cancelled",
        "c-nope": "unknown: never submitted, or its events have expired",
    })  # fmt: skip


def test_cancel_of_an_unknown_id_leaves_a_later_job_of_that_name_alone(sluice: Command) -> None:
    sluice("cancel", "c-early")
    assert sluice("submit", "Count to 3.", "--id", "c-early", "--wait")[0] == 0


def test_worker_that_cannot_start_says_why_and_exits_with_2(sluice: Command) -> None:
    code, _, err = sluice.process("worker", "--model", "/nowhere", "--max-rows", "0")
    assert (code, err.startswith("sluice: SLUICE_MAX_ROWS=0"), "Traceback" in err) == (2, True, False)


@pytest.mark.parametrize(
    ("args", "stdin", "said"),
    [
        (("chat", "Hello!", "--redis-url", "localhost:6379"), "", "One looks like redis://localhost:6379/0"),
        (("chat", "Hello!", "--redis-url", "redis://localhost/0?speed=9"), "", "One looks like redis://localhost"),
        (("chat",), "", "`-` to read it from stdin"),
        (("chat", "-"), "\n", "the message is empty"),
        (("chat", "Hello!", "--model", "a/b"), "", "a model name must match"),
        (("tail", "nope"), "", "Check the id"),
        (("tail", "no pe"), "", "a job id must match"),
        (
            ("worker", "models/x"),
            "",
            "models/x: the model must be given with an option. Write: sluice worker --model models/x",
        ),
        (("worker", "--model", "a", "b"), "", "b: unknown argument. See: sluice worker --help"),
        (("submit",), "", "either a message or --file"),
        (("submit", "--file", "nope.json"), "", "cannot read nope.json: No such file"),
        (("submit", "--file", "-"), '{"messages": [}', "stdin is not JSON: Expecting value at line 1 column 15: '}'"),
        (("submit", "--file", "-"), '{"message": []}', "stdin is not a request: it must look like"),
        (("submit", "--file", "-"), '{"messages": [], "seed": 1e999}', "the job cannot be queued"),
    ],
)
def test_mistake_is_told_in_one_sentence_with_exit_code_2(
    sluice: Command, args: tuple[str, ...], stdin: str, said: str
) -> None:
    code, out, err = sluice(*args, stdin=stdin)
    assert (code, out, said in err, len(err.splitlines())) == (2, "", True, 1), err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("chat", "Hello!", "--lane", "gold"), "'--lane': it must be interactive or batch, not 'gold'."),
        (("queue", "purge", "x", "--lane", "gold"), "'--lane': it must be interactive or batch, not 'gold'."),
        (("chat", "Hello!", "--max-tokens", "many"), "'--max-tokens': it must be a whole number, not 'many'."),
        (("chat", "Hello!", "--temperature", "x"), "'--temperature': it must be a number, not 'x'."),
        (("submit", "Hello!", "--wait-worker", "-1"), "'--wait-worker': it must be at least 0, not -1.0."),
        (("batch", "run", "in", "-o", "out", "--window", "0"), "'--window': it must be at least 1, not 0."),
        (("batch", "schedule", "-n", "101"), "'-n' / '--runs': it must be at most 100, not 101."),
    ],
)
def test_a_bad_value_of_an_option_is_told_in_our_words(sluice: Command, args: tuple[str, ...], said: str) -> None:
    code, out, err = sluice(*args)
    assert (code, out, last_line(err)) == (2, "", f"Error: Invalid value for {said}")


@pytest.mark.parametrize(
    ("args", "stdin", "code"),
    [
        (("submit", "--file", "-", "--model", "nobody", "--id", "é"), '{"messages": []}', 2),
        (("queue", "purge", "default"), "n\n", 0),
        (("chat", "Count to 5.", "--temperature", "0", "--json", "--max-tokens", "x"), "", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (("submit", "--file", "-", "--model", "nobody", "--id", "a"), '{"messages": []}', 0),
                (("workers", "--json", "--model"), "", 2),
                (("tail", "nope"), "", 2),
                (("queue", "list"), "", 0),
                (("dead", "list"), "", 0),
                (("--help",), "", 0),
                ((), "", 2),
            ]
        ),
    ],
)
def test_the_command_does_the_same_in_a_process_of_its_own(
    sluice: Command, alive: WorkerProcess, args: tuple[str, ...], stdin: str, code: int
) -> None:
    """Most tests run it in theirs."""
    said = sluice(*args, stdin=stdin)
    sluice.db.flushdb()
    alive.wait_ready()
    assert said == sluice.process(*args, stdin=stdin)
    assert said[0] == code


def test_missing_server_is_named_without_its_password(sluice: Command) -> None:
    port = free_port()
    code, _, err = sluice("chat", "Hello!", "--redis-url", f"redis://:secret@127.0.0.1:{port}/0")
    assert (code, "secret" in err) == (2, False)
    assert f"redis://***@127.0.0.1:{port}/0" in err
    assert "`sluice up --model FOLDER_OR_HUB_ID`" in err


@pytest.mark.parametrize(
    ("missing", "args", "hint"),
    [
        ("rich", "--help", "pip install 'typer>=0.20' 'rich>=13'"),
        ("typer", "--help", "pip install 'typer>=0.20' 'rich>=13'"),
        ("arq", "worker", "run ./scripts/setup worker,server"),
        # The worker imports it when it runs.
        ("mlx_lm", "worker --model tiny", "run ./scripts/setup worker,server"),
    ],
)
def test_missing_extra_is_told_in_one_sentence(sluice: Command, missing: str, args: str, hint: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from sluice.cli import main; main()"
    status, _, err = sluice.python("-c", code, *args.split())
    *logged, told = err.splitlines()
    assert (status, hint in told) == (2, True), err
    assert all(" W sluice." in line for line in logged), err


@pytest.mark.parametrize("command", ["", "worker", "chat", "submit", "tail", "cancel"])
def test_help_teaches_with_an_example_and_needs_no_worker(sluice: Command, command: str) -> None:
    code, out = sluice.help(*command.split())
    assert (code, f"    sluice {command}" in out) == (0, True)


@pytest.mark.parametrize(
    "group",
    ["", "batch", "batch schedule", "dead", "keys", "models", "prefix", "queue", "service", "webhooks", "workers"],
)
def test_the_summary_of_each_command_is_whole_on_80_columns(group: str, tmp_path: Path) -> None:
    code, out, _ = run_here(*group.split(), "--help", env={**os.environ, "COLUMNS": "80"}, folder=tmp_path)
    summaries = out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert (code, len(summaries) > 1) == (0, True)
    assert [line for line in summaries if line.endswith("...") or len(line) > 80] == []


@pytest.mark.parametrize("command", ["cancel", "chat", "check", "batch run", "batch submit", "dead show", "prefix pin"])
def test_the_help_of_an_argument_has_no_type_of_python(command: str, tmp_path: Path) -> None:
    code, out, _ = run_here(*command.split(), "--help", env=os.environ, folder=tmp_path)
    arguments = out.partition("Arguments:\n")[2].partition("\n\n")[0]
    assert (code, bool(arguments), "<" in arguments) == (0, True, False)


def test_the_command_starts_where_no_worker_is_installed(sluice: Command) -> None:
    without = "import sys; sys.modules.update(schemas=None, worker=None); from sluice.cli import main; main()"
    code, out, _ = sluice.python("-c", without, "--help")
    assert (code, "Commands" in out) == (0, True)
