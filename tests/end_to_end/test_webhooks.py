"""`sluice webhooks` and `--on-end`: commands, processes that are killed, and a gateway."""

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import InvalidWebhookSignatureError, OpenAI
from standardwebhooks import Webhook

from sluice.webhooks.endpoint import Endpoint
from tests.batch.helpers import line, write
from tests.end_to_end.test_cli import Command
from tests.gateway.gateways import gateway_process
from tests.support.stack import ROOT
from tests.webhooks.conftest import receiver as receiver
from tests.webhooks.receiver import Receiver

_TIMEOUT_S = 60


def wait_for(receiver: Receiver, requests: int) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while len(receiver.received) < requests:
        assert time.monotonic() < deadline, f"{len(receiver.received)} of {requests} requests"
        time.sleep(0.01)


def add(sluice: Command, url: str, *options: str) -> tuple[str, str]:
    """Add an endpoint, and return its id and its secret."""
    code, out, err = sluice("webhooks", "add", url, "--allow-private", "--json", *options)
    assert code == 0, err
    added = json.loads(out)
    return added["id"], added["secret"]


def test_an_endpoint_is_added_tried_rotated_and_removed(sluice: Command, receiver: Receiver) -> None:
    code, secret, err = sluice("webhooks", "add", receiver.url, "--event", "batch.*", "--allow-private")
    assert (code, secret.startswith("whsec_"), secret in err) == (0, True, False)
    _, listed, _ = sluice("webhooks", "list", "--json")
    endpoint = json.loads(listed)
    assert (endpoint["url"], endpoint["tenant"], secret.strip() in listed) == (receiver.url, None, False)

    assert sluice("webhooks", "test", endpoint["id"])[0] == 0
    (tried,) = receiver.received
    assert Webhook(secret.strip()).verify(tried.body, tried.headers)["type"] == "webhook.test"
    receiver.status = 404
    code, _, err = sluice("webhooks", "test", endpoint["id"])
    assert (code, "it answered 404" in err) == (1, True)

    _, rotated, _ = sluice("webhooks", "rotate", endpoint["id"], "--overlap", "1h")
    receiver.status = 200
    sluice("webhooks", "test", endpoint["id"])
    for each in (secret, rotated):
        Webhook(each.strip()).verify(receiver.received[-1].body, receiver.received[-1].headers)

    _, table, _ = sluice("webhooks", "list")
    assert endpoint["id"] in table
    assert "batch.*" in table
    assert sluice("webhooks", "rm", endpoint["id"])[0] == 0
    assert sluice("webhooks", "list")[2] == "there are no endpoints.\n"


def test_an_endpoint_that_answers_again_is_enabled_again(sluice: Command, receiver: Receiver) -> None:
    id, _ = add(sluice, receiver.url, "--event", "job.cancelled")
    stored = json.loads(str(sluice.db.hget("sluice:webhooks", id)))
    sluice.db.hset("sluice:webhooks", id, json.dumps({**stored, "disabled": "it answered 410"}))
    assert "disabled: it answered 410" in sluice("webhooks", "list")[1]
    assert sluice("webhooks", "test", id)[0] == 0
    assert "disabled" not in json.loads(str(sluice.db.hget("sluice:webhooks", id)))
    assert sluice.db.hkeys("sluice:webhooks:wanted") == ["job"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "https://hooks.example/", "--event", "batch"), "there is no event 'batch'"),
        (("add", "http://hooks.example/", "--event", "batch.*"), "https:"),
        (("add", "https://10.0.0.1/", "--event", "batch.*"), "--allow-private"),
        (("add", "hooks.example", "--event", "batch.*"), "the URL must begin with"),
        (("add", "https://hooks.example/", "--event", "batch.*", "--tenant", ""), "--tenant: a name has 1 to 128"),
        (("rotate", "we_1", "--overlap", "a day"), "--overlap: 'a day' is not a time"),
        (("rotate", "we_1"), "there is no endpoint 'we_1'"),
        (("test", "we_1"), "there is no endpoint 'we_1'"),
        (("rm", "we_1"), "there is no endpoint 'we_1'"),
        (("retry", "evt_1"), "there is no dead letter of 'evt_1'"),
    ],
)
def test_what_cannot_be_done_is_a_sentence_and_exit_code_2(
    sluice: Command, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = sluice("webhooks", *arguments)
    assert (code, out, said in err, len(err.splitlines())) == (2, "", True, 1), err


def test_a_deliverer_that_is_killed_before_it_notes_the_answer_sends_again_with_the_same_id(
    sluice: Command, receiver: Receiver
) -> None:
    _, secret = add(sluice, f"{receiver.url}/hook", "--event", "job.cancelled")
    sluice("submit", "--id", "a", "--model", "nobody", "Hi.")
    assert sluice("cancel", "a")[0] == 0
    receiver.slow_s = {"/hook": 1.0}
    with sluice.running("webhooks", "deliver") as process:
        wait_for(receiver, 1)
        process.send_signal(signal.SIGKILL)
    receiver.slow_s = {}
    due = next(iter(sluice.db.scan_iter("sluice:webhooks:due:*")))
    ((event, lease),) = sluice.db.zrange(due, 0, -1, withscores=True)
    assert lease > time.time() * 1000, "it holds a lease still"
    sluice.db.zadd(due, {event: 1})  # the minute of the lease passes
    with sluice.running("webhooks", "deliver") as process:
        wait_for(receiver, 2)
        deadline = time.monotonic() + _TIMEOUT_S
        while sluice.db.exists(due):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(_TIMEOUT_S) == 0
    assert [each.id for each in receiver.received] == [event, event]
    for each in receiver.received:
        assert Webhook(secret).verify(each.body, each.headers)["data"] == {"id": "a"}


@pytest.mark.usefixtures("alive")
def test_a_gateway_tells_of_background_responses_and_of_no_other_request(
    sluice: Command, redis_url: str, receiver: Receiver
) -> None:
    _, secret = add(sluice, receiver.url, "--event", "response.*", "--event", "job.*")
    with gateway_process(redis_url) as gateway:
        openai = OpenAI(base_url=gateway.base_url, api_key="none", webhook_secret=secret)
        openai.responses.create(model="default", input="Count to 3.")
        openai.chat.completions.create(model="default", messages=[{"role": "user", "content": "Count to 3."}])
        whole = openai.responses.create(model="default", input="Count to 3.", background=True)
        cut = openai.responses.create(model="default", input="Count to 90.", background=True, max_output_tokens=16)
        wait_for(receiver, 2)
        events = [openai.webhooks.unwrap(each.body, each.headers) for each in receiver.received]
        assert sorted((event.data.id, event.type) for event in events) == sorted(
            [(whole.id, "response.completed"), (cut.id, "response.incomplete")]
        )
        deadline, counted = time.monotonic() + _TIMEOUT_S, 'sluice_serve_webhook_attempts_total{result="delivered"} 2.0'
        while counted not in httpx.get(f"{gateway.url}/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("code", [0, 7])
def test_a_command_runs_at_the_end_of_a_run_and_its_failure_changes_no_exit_code(
    sluice: Command, tmp_path: Path, code: int
) -> None:
    write(tmp_path / "in.jsonl", line("a", messages=[{"role": "user", "content": "Count to 3."}]))
    program = "import json, os, sys; json.dump([{**os.environ}, json.load(sys.stdin)], open('end', 'w')); print(1)"
    command = f'{sys.executable} -c "{program}"; exit {code}'
    run = sluice.process("batch", "run", "in.jsonl", "-o", "out.jsonl", "--json", "--on-end", command)
    assert run[0] == 0, run[2]
    env, status = json.loads((tmp_path / "end").read_text())
    assert json.loads(run[1]) == status
    assert [env[f"SLUICE_BATCH_{name}"] for name in ("ID", "STATUS", "OUTPUT", "ERRORS")] == [
        status["id"], "completed", str(tmp_path / "out.jsonl"), "",
    ]  # fmt: skip
    assert ("failed with exit code 7" in run[2]) == (code == 7)


def test_the_page_s_example_reads_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "webhooks.md").read_text(), re.DOTALL)
    endpoint = Endpoint.new("https://example.com/", ["batch.failed"], None, allow_private=False, created_at=1)
    body = b'{"id":"evt_1","object":"event","created_at":1,"type":"batch.failed","data":{"id":"batch_1"}}'
    found: dict[str, Any] = {}
    exec(source.replace("whsec_...", endpoint.secrets[0].value), found)
    found["hook"](body, endpoint.headers("evt_1", body, round(time.time() * 1000)))
    assert capsys.readouterr().out == "batch.failed batch_1\n"
    with pytest.raises(InvalidWebhookSignatureError):
        found["hook"](body + b" ", endpoint.headers("evt_1", body, round(time.time() * 1000)))
