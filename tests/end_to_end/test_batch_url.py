"""`sluice batch --url` as people call it: the same output and exit codes as against a Redis server."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai.types import Batch

from tests.batch.helpers import ids, line, read, write
from tests.batch.openai_server import OpenAIServer, openai_server
from tests.end_to_end.test_cli import Command
from tests.support.stack import Feeder, GatewayProcess


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with openai_server(models=("default",)) as server:
        yield server


@pytest.fixture
def remote(tmp_path: Path, server: OpenAIServer) -> Iterator[Command]:
    """The command without any variable of a Redis server."""
    command = Command("redis://127.0.0.1:1/0", tmp_path)
    del command.env["SLUICE_REDIS_URL"]
    command.env["SLUICE_URL"] = server.url
    yield command
    command.db.close()


def test_run_reports_as_it_does_with_a_redis_server(remote: Command, tmp_path: Path) -> None:
    many = write(tmp_path / "in.jsonl", line("a"), line("bad"))
    code, out, err = remote("batch", "run", str(many), "-o", "out.jsonl")
    assert (code, "2: 1 answered, 1 failed" in out, "Traceback" in err) == (1, True, False), err
    assert (str(tmp_path / "out.errors.jsonl") in out, err.startswith("batch_1: 2 lines")) == (True, True)
    assert (ids(tmp_path / "out.jsonl"), ids(tmp_path / "out.errors.jsonl")) == (["a"], ["bad"])
    code, again, err = remote("batch", "run", str(many), "-o", "out.jsonl")
    assert (code, again, "complete already" in err) == (1, out, True)
    code, out, _ = remote("batch", "run", str(many), "-o", "out.jsonl", "--json")
    assert (code, Batch.model_validate_json(out, strict=True).output_file_id) == (1, str(tmp_path / "out.jsonl"))


def test_a_run_is_submitted_listed_cancelled_and_its_answers_are_fetched(remote: Command, tmp_path: Path) -> None:
    many = write(tmp_path / "in.jsonl", line("a"), line("b"))
    code, said, err = remote("batch", "submit", str(many))
    run_id = said.strip()
    assert (code, f"sluice batch status {run_id}" in err) == (0, True)
    assert remote("batch", "results", run_id)[::2] == (0, f"{run_id} has no answered lines yet.\n")
    assert "completed" in remote("batch", "status", run_id)[1]
    assert run_id in remote("batch", "list")[1]
    assert json.loads(remote("batch", "list", "--json")[1])["status"] == "completed"
    assert remote("batch", "cancel", run_id)[:2] == (0, f"{run_id}  already completed\n")
    answers = remote("batch", "results", run_id)[1]
    assert [json.loads(raw)["custom_id"] for raw in answers.splitlines()] == ["a", "b"]
    assert remote("batch", "results", run_id, "-o", "fetched.jsonl")[0] == 0
    assert read(tmp_path / "fetched.jsonl") == [json.loads(raw) for raw in answers.splitlines()]
    assert remote("batch", "results", run_id, "--errors")[::2] == (0, f"{run_id} has no failed lines.\n")
    assert sorted(os.listdir(tmp_path)) == ["fetched.jsonl", "in.jsonl"]


def test_a_table_is_run_at_a_gateway(remote: Command, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,word\na,one\nbad,two\n")
    (tmp_path / "p.txt").write_text("Say {word}.")
    command = ("batch", "run", "in.csv", "-o", "out.csv", "--prompt", "p.txt", "--key-column", "id")
    code, out, err = remote(*command, "--dry-run")
    assert (code, "2 rows, 16 characters. Their tokens were not counted: --url" in out) == (0, True), err
    code, _, err = remote(*command)
    assert (code, "out.csv: 2 rows, 1 of them with an error" in err) == (1, True), err
    header, first, second = (tmp_path / "out.csv").read_text().splitlines()
    assert (header, first.startswith("a,one,"), second.startswith("bad,two,,")) == ("id,word,answer,error", True, True)


def test_ctrl_c_leaves_the_run_to_the_gateway_and_the_same_command_fetches_its_answers(
    remote: Command, server: OpenAIServer, tmp_path: Path
) -> None:
    many = write(tmp_path / "in.jsonl", line("a"))
    server.stops_at = "in_progress"
    with remote.running("batch", "run", str(many), "-o", "out.jsonl") as process:
        deadline = time.monotonic() + 60
        while server.count("GET /v1/batches/batch_1") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, "the run goes on at the gateway" in err, "Traceback" in err) == (3, True, False), err
    server.stops_at = "completed"
    assert remote("batch", "run", str(many), "-o", "out.jsonl")[0] == 0
    assert (ids(tmp_path / "out.jsonl"), len(server.batches)) == (["a"], 1)


def test_a_comparison_that_is_interrupted_goes_on_with_its_runs(
    remote: Command, server: OpenAIServer, tmp_path: Path
) -> None:
    (tmp_path / "in.csv").write_text("word\none\n")
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name}: say {{word}}.")
    command = ("batch", "compare", "in.csv", "--prompt", "a.txt", "--prompt", "b.txt")
    server.stops_at = "in_progress"
    with remote.running(*command) as process:
        deadline = time.monotonic() + 60
        while server.count("GET /v1/batches/batch_1") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    folder = err.partition("run the same command again with -o ")[2].rstrip(".\n")
    assert (process.returncode, Path(folder).is_dir()) == (3, True), err
    server.stops_at = "completed"
    code, out, err = remote(*command, "-o", folder)
    assert (code, len(server.batches), "1 of 1" in out) == (0, 2, True), err
    shutil.rmtree(folder)


def test_a_run_at_a_gateway_and_one_of_this_machine_are_never_mixed_up(
    remote: Command, server: OpenAIServer, tmp_path: Path
) -> None:
    many = write(tmp_path / "in.jsonl", line("a"))
    assert remote("batch", "run", str(many), "-o", "out.jsonl")[0] == 0
    before = (tmp_path / "out.jsonl.run").read_bytes()
    # Nothing listens at this address: the file is refused before the server is reached, or the server is.
    code, _, err = remote("batch", "run", str(many), "-o", "out.jsonl", "--redis-url", "redis://127.0.0.1:1")
    assert (code, (tmp_path / "out.jsonl.run").read_bytes() == before, "Traceback" in err) == (2, True, False)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["status", "batch_9"], "answers with 404: No batch found with id 'batch_9'."),
        (["results", "batch_9"], "answers with 404"),
        (["cancel", "batch_9"], "answers with 404"),
        (["list", "--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["list", "--url", "redis://127.0.0.1:9"], "--url: 'redis://127.0.0.1:9' is not a URL such as http://"),
        (["list", "--redis-url", "redis://h", "--url", "http://h"], "--url and --redis-url exclude one another"),
        (["run", "in.jsonl", "-o", "out.jsonl", "--window", "3"], "window: a server over HTTP does not take it"),
        (["run", "missing.jsonl", "-o", "out.jsonl"], "cannot read"),
        (["run", "in.jsonl", "-o", "in.jsonl"], "must be different files"),
        (["run", "in.jsonl", "-o", "nowhere/out.jsonl"], "No such file"),
        (["run", "in.jsonl", "-o", "out.jsonl", "--completion-window", "soon"], "such as 24h"),
        (["run", "in.jsonl", "-o", "out.jsonl", "--model", "other"], "no worker serves other (1 line)"),
        (["results", "batch_9", "-o", "out.csv"], "out.csv: a gateway has the lines of a run, and not its table"),
        (["submit", "in.jsonl", "--dir", "runs"], "--dir and --url exclude one another"),
        (["submit", "missing.jsonl"], "missing.jsonl"),
        (["submit", "in.csv"], "in.csv is a table: run it with `sluice batch run`"),
        (["submit", "pipe"], "not a regular file"),
    ],
)
def test_what_cannot_be_done_is_a_sentence_and_exit_code_2(
    remote: Command, tmp_path: Path, args: list[str], sentence: str
) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    os.mkfifo(tmp_path / "pipe")
    given = [*args, "--url", remote.env["SLUICE_URL"]] if "--dir" in args else args
    code, out, err = remote("batch", *given)
    assert (code, out, sentence in err, "Traceback" in err) == (2, "", True, False), err
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "pipe"]


def test_two_variables_are_a_sentence_and_an_option_decides(remote: Command, server: OpenAIServer) -> None:
    remote.env["SLUICE_REDIS_URL"] = "redis://127.0.0.1:1/0"
    code, _, err = remote("batch", "list")
    assert (code, "SLUICE_URL and the variable of a Redis server exclude one another" in err) == (2, True)
    assert remote("batch", "list", "--url", server.url)[0] == 0
    code, _, err = remote("batch", "submit", "in.jsonl", "--dir", "runs")
    assert (code, "no server answers at redis://127.0.0.1:1/0" in err) == (2, True), err
    code, _, err = remote("batch", "list", "--redis-url", "redis://127.0.0.1:1/0")
    assert (code, "no server answers at redis://127.0.0.1:1/0" in err) == (2, True)


def test_a_refused_key_is_told_with_its_variable(remote: Command, server: OpenAIServer) -> None:
    server.key = "secret"
    code, _, err = remote("batch", "list", "--key", "wrong")
    assert (code, "Give the key with --key, or in SLUICE_API_KEY." in err, "wrong" in err) == (2, True, False)
    remote.env["SLUICE_API_KEY"] = "secret"
    assert remote("batch", "list")[0] == 0


@pytest.mark.parametrize("command", ["run", "submit", "status", "list", "cancel", "results"])
def test_help_says_when_a_gateway_is_used(remote: Command, command: str) -> None:
    code, out = remote.help("batch", command)
    assert (code, "machines that do not reach the Redis server" in " ".join(out.split())) == (0, True)


@pytest.mark.usefixtures("alive")
def test_a_gateway_and_a_redis_server_give_the_same_answers_and_the_same_report(
    sluice: Command, redis_url: str, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "Count to 4."}]
    good = [line(f"r{k}", messages=messages, temperature=0, model="gpt-4o-mini") for k in range(3)]
    many = str(write(tmp_path / "in.jsonl", *good, line("bad", temperature=9, model="gpt-4o-mini")))
    (tmp_path / "runs").mkdir()
    found = list[object]()
    with GatewayProcess(redis_url, batch_dir=tmp_path / "runs") as gateway, Feeder(redis_url, tmp_path / "runs"):
        own = str(write(tmp_path / "own.jsonl", line("own", messages=messages, model="default")))
        code, out, _ = sluice("batch", "submit", own, "--dir", "runs")  # a run of the folder, without an uploaded file
        listed = sluice("batch", "list", "--url", gateway.url, "--json")
        assert (code, Batch.model_validate_json(listed[1], strict=True).id) == (0, out.strip()), listed
        for name, server in (("local", []), ("remote", ["--url", gateway.url])):
            files = "-o", f"{name}.jsonl", "--map", "gpt-4o-mini=default"
            code, out, err = sluice("batch", "run", many, *files, *server, "--json")
            report = json.loads(out)
            answers = {said["custom_id"]: said["response"]["body"] for said in read(tmp_path / f"{name}.jsonl")}
            texts = {id: (body["choices"], body["usage"]["total_tokens"]) for id, body in answers.items()}
            counts = report["request_counts"], report["sluice"]["failures"], report["usage"]["total_tokens"]
            found.append((code, report["status"], counts, texts, ids(tmp_path / f"{name}.errors.jsonl")))
            assert "Traceback" not in err
        assert sluice("batch", "run", many, "-o", "other.jsonl", "--url", gateway.url)[0] == 2, "no such model"
    assert found[0] == found[1]
    assert found[0][0] == 1  # type: ignore[index]
