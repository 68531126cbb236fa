"""The parts of `scripts/conformance` that drive programs, without the programs."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from http.client import RemoteDisconnected
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.conformance.programs import installed, tried
from tests.support.conformance.programs.checks import CHECKS, QUICK, lost_prefixes
from tests.support.conformance.programs.installed import Installed
from tests.support.conformance.programs.pages import GATEWAY, PAGES, read_config
from tests.support.conformance.programs.player import Player
from tests.support.conformance.programs.programs import DRIVERS, PROGRAMS, Fault, Program, Turn
from tests.support.conformance.programs.record import Connection, Recorder
from tests.support.conformance.programs.run import _failed
from tests.support.conformance.programs.sandbox import Home, NoSandbox, try_to_leave_network
from tests.support.conformance.programs.script import MODEL, Step, answer_to, message
from tests.support.conformance.programs.selection import Unknown, select
from tests.support.conformance.programs.stage import CONTEXT_TOKENS, Played
from tests.support.conformance.programs.table import Failure, Missing, OwnFault, Passed, Row, reasons, table
from worker.outcomes import Outcome, Sampled
from worker.request import GenerationRequest


def prompt(*turns: tuple[str, str]) -> str:
    written = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"{written}<|im_start|>assistant\n"


CALL = Step(think="I look.", say="One moment.", calls=(("bash", {"command": "ls"}),))
ASKED = ("user", f"<reminder>be brief</reminder>\n{message(CALL, Step(say='Done: {results}.'))}\n")


def test_a_prompt_gets_the_answer_that_its_last_message_asks_for() -> None:
    first = answer_to(prompt(("system", "Tools"), ("user", message(Step(say="no"))), ("assistant", "no"), ASKED))
    assert (first.number, first.turn) == (0, 2)
    assert first.text == (
        "<think>\nI look.\n</think>\n\nOne moment."
        '\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    )
    results = [("user", f"<tool_response>\n{name}\n</tool_response>") for name in ("a.py", "b.py")]
    second = answer_to(prompt(ASKED, ("assistant", first.text), *results))
    assert (second.text, second.number) == ("Done: a.py | b.py.", 1)


def test_a_message_without_a_script_after_one_with_a_script_gets_another_answer() -> None:
    answer = answer_to(prompt(ASKED, ("assistant", "x"), ("user", "Summarize the conversation.")))
    assert (answer.step, answer.turn) == (None, 0)


def test_an_answer_that_broke_off_is_ended_if_the_last_message_asks_for_its_rest() -> None:
    asked = ("user", message(Step(say="one two three")))
    rest = ("user", "Go on after this:\n<previous_response_suffix>\none two\n</previous_response_suffix>")
    answer = answer_to(prompt(asked, ("assistant", "one two"), rest))
    assert (answer.text, answer.number, answer.turn) == (" three", 0, 1)


def test_the_weather_is_asked_of_its_tool() -> None:
    asked = ("user", "What is the weather in San Francisco?")
    assert '"name": "get_weather"' in answer_to(prompt(("system", "Tools: get_weather"), asked)).text
    assert "get_weather" not in answer_to(prompt(asked)).text
    result = ("user", "<tool_response>\nweather: sunny\n</tool_response>")
    assert "get_weather" not in answer_to(prompt(("system", "get_weather"), asked, ("assistant", "x"), result)).text


def test_a_message_that_a_program_has_quoted_is_read() -> None:
    quoted = json.dumps(message(Step(say='A "word".')))
    assert answer_to(prompt(("user", quoted))).text == 'A "word".'


def test_arguments_that_are_a_string_are_written_as_they_are() -> None:
    written = answer_to(prompt(("user", message(Step(calls=(("bash", '{"command": '),)))))).text
    assert '"arguments": {"command": }' in written


def test_an_answer_may_be_said_many_times() -> None:
    assert answer_to(prompt(("user", message(Step(say="w", repeat=3))))).text == "w 0 w 1 w 2"


class Letters:
    """A tokenizer whose tokens are letters."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


class Heard:
    def __init__(self) -> None:
        self.outcomes = list[Outcome]()

    def on_outcome(self, outcome: Outcome, rows: int) -> None:
        self.outcomes.append(outcome)

    @property
    def text(self) -> str:
        tokens = [outcome.token for outcome in self.outcomes if isinstance(outcome, Sampled)]
        return "".join(chr(token) for token in tokens if token is not None)

    @property
    def ending(self) -> str | None:
        last = self.outcomes[-1] if self.outcomes else None
        return last.finish_reason if isinstance(last, Sampled) else None


async def play(player: Player, text: str, **more: Any) -> Heard:
    heard = Heard()
    request = GenerationRequest(**{"id": text, "prompt": tuple(map(ord, text)), "max_tokens": 100, **more})
    player.submit(request, heard.on_outcome)
    await wait_for(lambda: heard.ending is not None)
    player.remove(request.id)
    return heard


async def wait_for(ready: Callable[[], bool]) -> None:
    while not ready():
        await asyncio.sleep(0.001)


async def test_the_player_answers_by_script_and_finds_the_prefix_of_an_earlier_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("PLAYER_LOG", str(log))
    player, asked = Player(Letters()), prompt(("user", message(Step(say="Hello."))))
    first = await play(player, asked)
    assert (first.text, first.ending) == ("Hello.", "stop")
    longer = f"{asked}Hello.<|im_end|>\n{prompt(('user', message(Step(say='Bye.'))))}"
    assert (await play(player, longer)).text == "Bye."
    noted = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["turn"], line["found_tokens"]) for line in noted] == [(1, 0), (2, len(asked) + len("Hello."))]


async def test_the_player_ends_at_the_limit_and_resumes() -> None:
    player, asked = Player(Letters()), prompt(("user", message(Step(say="Hello."))))
    cut = await play(player, asked, max_tokens=3)
    assert (cut.text, cut.ending) == ("Hel", "length")
    rest = await play(player, asked, id="again", resume_tokens=tuple(map(ord, "Hel")))
    assert (rest.text, rest.ending) == ("lo.", "stop")


async def test_an_answer_that_is_removed_is_noted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAYER_LOG", str(tmp_path / "log"))
    player, heard = Player(Letters()), Heard()
    asked = prompt(("user", message(Step(say="Hello.", token_s=60))))
    player.submit(GenerationRequest(id="a", prompt=tuple(map(ord, asked)), max_tokens=9), heard.on_outcome)
    await wait_for(lambda: bool(heard.outcomes))
    for _ in range(2):
        player.remove("a")
    assert (tmp_path / "log").read_text().splitlines()[1:] == ['{"stopped": "a"}']


def played(turn: int, prompt_tokens: int, found_tokens: int) -> Played:
    return Played("job", turn, 0, prompt_tokens, found_tokens, 0, 100)


def test_a_prompt_that_does_not_begin_with_the_one_before_is_named() -> None:
    assert lost_prefixes([played(1, 100, 0), played(2, 150, 110), played(3, 190, 148)]) == []
    assert lost_prefixes([played(1, 100, 0), played(2, 150, 40)]) == ["turn 2, answer 0: 40 of 100 tokens"]


def test_a_prompt_beside_the_conversation_loses_nothing() -> None:
    title = played(1, 80, 3)
    assert lost_prefixes([played(1, 100, 0), title, played(2, 150, 110)]) == []
    assert lost_prefixes([played(1, 100, 0), title, played(2, 150, 40)]) == ["turn 2, answer 0: 40 of 100 tokens"]


PAGE = """\
Text with `~/other`.

`~/.tool/config.json`, which `tool login` writes:

```json
{"url": "http://127.0.0.1:8000/v1"}
```

```console
$ export TOOL_URL=http://127.0.0.1:8000   # the gateway
$ tool --help
```

```sh
export TOOL_KEY=none
```
"""


def test_a_page_has_the_files_and_the_environment_of_its_program(tmp_path: Path) -> None:
    config = read_config(PAGE).at("http://127.0.0.1:9")
    assert config.files == {".tool/config.json": '{"url": "http://127.0.0.1:9/v1"}\n'}
    assert config.environment == {"TOOL_URL": "http://127.0.0.1:9", "TOOL_KEY": "none"}
    config.write(tmp_path)
    assert json.loads((tmp_path / ".tool/config.json").read_text()) == {"url": "http://127.0.0.1:9/v1"}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_each_program_has_a_page_with_the_gateway_and_the_model(program: Program) -> None:
    page = (PAGES / f"{program.page or program.name}.md").read_text("utf-8")
    config = read_config(page)
    pasted = "".join([*config.files.values(), *config.environment.values()])
    assert GATEWAY in pasted
    assert str(CONTEXT_TOKENS) in pasted or "context" not in pasted.lower()
    assert MODEL in page
    assert set(program.faults) <= set(CHECKS)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_each_program_has_a_command_for_a_turn(program: Program, tmp_path: Path) -> None:
    installed = Installed(program, tmp_path, tmp_path, "1")
    first, *others = installed.command(Turn("the message", goes_on=True), tmp_path)
    assert "the message" in others
    assert Path(first).is_absolute()
    driver = program.command(Turn(""))[0]
    assert (DRIVERS / driver).is_file() or "." not in driver


def test_every_page_of_a_client_is_driven() -> None:
    driven = {program.page or program.name for program in PROGRAMS.values()}
    assert {page.stem for page in PAGES.glob("*.md")} - {"README"} == driven


def test_a_run_without_arguments_has_the_quick_checks() -> None:
    programs, checks = select(None, None)
    assert set(programs) <= set(PROGRAMS)
    assert checks == list(QUICK)
    assert select("codex, llm", None) == (["codex", "llm"], list(CHECKS))
    assert select("all", "start")[0] == list(PROGRAMS)


@pytest.mark.parametrize(("programs", "checks"), [("codecs", None), ("codex", "begin")])
def test_an_unknown_name_is_refused_with_those_that_there_are(programs: str, checks: str | None) -> None:
    with pytest.raises(Unknown, match="choose from"):
        select(programs, checks)


def test_the_table_tells_failures_from_the_faults_of_programs() -> None:
    row = Row("codex", "1.0", {"start": Passed(), "tools": Failure("no call"), "images": Missing()})
    other = Row("llm", "2.0", {"start": Passed(), "tools": OwnFault("it has none")})
    console = Console(width=100, record=True)
    console.print(table([row, other]))
    lines = [line.split() for line in console.export_text().splitlines() if "1.0" in line or "2.0" in line]
    assert lines == [["codex", "1.0", "pass", "FAIL", "·"], ["llm", "2.0", "pass", "own", "fault", "·"]]
    assert reasons([row, other]) == ["codex, tools: no call", "llm, tools: client's own fault: it has none"]
    assert (row.passed, other.passed) == (False, True)
    assert not Row("absent", problem="not installed").passed


README = f"# Clients\n\n{tried._BEGIN}{tried._END}\nThe end.\n"


def test_what_was_tried_is_written_in_pieces_of_one_version_each() -> None:
    fault = OwnFault(PROGRAMS["llm"].faults["gateway"].why)
    first = Row("llm", "1.0", {"start": Passed(), "gateway": fault, "images": Missing(), "tools": Failure("no call")})
    kept = tried.with_table(README, tried.merge({}, [first, Row("pi", problem="not installed")], date(2026, 1, 2)))
    rows = tried.read_rows(kept)
    assert rows == {"llm": Row("llm", "1.0", {**first.cells, "tools": Failure("")}, day=date(2026, 1, 2))}
    assert kept.startswith("# Clients\n")
    assert kept.endswith("\nThe end.\n")
    assert f"- gateway, llm: {fault.reason}" in kept
    assert tried.with_table(kept, rows) == kept
    more = tried.merge(rows, [Row("llm", "1.0", {"tools": Passed()})], date(2026, 1, 3))["llm"]
    assert more.cells == {**first.cells, "tools": Passed()}
    newer = tried.merge(rows, [Row("llm", "1.1", {"tools": Passed()})], date(2026, 1, 3))
    assert tried.read_rows(tried.with_table(README, newer)) == newer
    assert newer["llm"] == Row("llm", "1.1", {"tools": Passed()}, day=date(2026, 1, 3))


def test_every_program_is_in_the_table_as_a_run_would_write_it() -> None:
    readme = (PAGES / "README.md").read_text("utf-8")
    rows = tried.read_rows(readme)
    assert set(rows) == set(PROGRAMS)
    assert tried.with_table(readme, rows) == readme


def test_only_the_known_failure_of_a_program_is_its_own_fault() -> None:
    known = Fault("ModelBehaviorError", "it raises")
    assert _failed("agents.ModelBehaviorError: no such tool", known) == OwnFault("it raises")
    assert _failed("POST /v1/responses 400", known) == Failure("POST /v1/responses 400")
    assert _failed("POST /v1/responses 400", None) == Failure("POST /v1/responses 400")


class Refusing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = b'{"error": "no"}'
        self.send_response(404 if "absent" in self.path else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_the_recorder_passes_on_both_directions_and_keeps_them(served: int) -> None:
    with Recorder(lambda: served) as recorder:
        with urllib.request.urlopen(f"{recorder.url}/v1/models", timeout=10) as answer:
            assert json.load(answer) == {"error": "no"}
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{recorder.url}/absent", timeout=10)
        refused.value.read()  # the headers may come first
        kept = recorder.take()
    assert [connection.exchanges() for connection in kept] == [[("GET /v1/models", 200)], [("GET /absent", 404)]]
    assert [connection.refusals() for connection in kept] == [[], ['GET /absent 404: {"error": "no"}']]


def test_the_recorder_closes_a_connection_while_there_is_no_gateway() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with Recorder(lambda: unused.getsockname()[1]) as recorder, pytest.raises(RemoteDisconnected):
            urllib.request.urlopen(recorder.url, timeout=10)


def test_the_text_of_an_answer_is_read_from_the_events_of_all_interfaces() -> None:
    events = (
        b'data: {"delta":{"content":"a\\n"}}\n\ndata: {"delta":"b"}\n\ndata: {"delta":{"type":"text_delta","text":"c"}}'
    )
    assert Connection(bytearray(), bytearray(events)).text() == "a\nbc"


def test_npm_runs_on_the_node_that_programs_run_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\nnode > $6/ran\n")
    for folder, version in (("old", "20"), ("new", "24")):
        (tmp_path / folder).mkdir()
        node = tmp_path / folder / "node"
        node.write_text(f"#!/bin/sh\necho {version}\n")
        node.chmod(0o755)
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{tmp_path / 'old'}:/usr/bin:/bin")
    installed._npm(tmp_path / "home", ["a"], tmp_path / "new")
    assert (tmp_path / "home" / "ran").read_text() == "24\n"


def test_a_request_without_an_answer_has_no_status() -> None:
    assert Connection(bytearray(b"POST /v1/chat/completions HTTP/1.1\r\n\r\n")).exchanges() == [
        ("POST /v1/chat/completions", 0)
    ]


def test_a_program_has_a_home_and_an_environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a real one")
    with Home("/usr/bin:/bin", {"SAID": "yes"}) as home:
        ran = home.run(["sh", "-c", "echo $HOME $SAID $OPENAI_API_KEY; pwd; exit 3"], 20)
        assert (ran.code, ran.output.split()) == (3, [str(home.folder), "yes", str(home.project)])
        assert home.run(["sleep", "60"], 0.1).code is None
    assert not home.folder.exists()


def test_what_still_runs_ends_with_the_home() -> None:
    with Home("/usr/bin:/bin", {}) as home:
        started = home.start(["sleep", "60"])
    assert started.process.returncode == -signal.SIGKILL


_LEAVE = """
import socket
from tests.support.conformance.programs.sandbox import NoSandbox, leave_network
try:
    leave_network()
except NoSandbox as error:
    raise SystemExit(f"none: {error}")
print([name for _, name in socket.if_nameindex()])
with socket.socket() as server, socket.socket() as client:
    server.bind(("127.0.0.1", 0))
    server.listen()
    client.connect(server.getsockname())
try:
    socket.create_connection(("192.0.2.1", 80), timeout=2)
except OSError:
    print("nothing outside")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs run on Linux alone")
def test_what_a_program_leaves_behind_in_a_session_of_its_own_ends_with_the_home() -> None:
    with Home("/usr/bin:/bin", {}) as home:
        waits = 'until grep -q "^sleep" /proc/$!/cmdline; do :; done'  # it has left the program's session then
        left = int(home.run(["sh", "-c", f"setsid sleep 60 >/dev/null 2>&1 & {waits}; echo $!"], 20).output)
    deadline = time.monotonic() + 10
    with suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{left}/stat").read_text().split()[2] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_machine_without_namespaces_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'not allowed here' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(NoSandbox, match="^not allowed here$"):
        try_to_leave_network()


def test_a_network_of_its_own_has_loopback_alone_or_the_reason_is_told() -> None:
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", _LEAVE], cwd=root, capture_output=True, text=True, timeout=60)
    if ran.returncode:
        assert ran.stderr.startswith("none: ")
    else:
        assert ran.stdout.splitlines() == ["['lo']", "nothing outside"]
