"""Gateway, blocking client and command go on after a failover in which no server dies."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable

import pytest

from sluice import SyncClient
from tests.support.chaos.harness import chat_request, paced_worker
from tests.support.chaos.paced import expected_text
from tests.support.sentinels import Sentinels, is_copied, replica_of
from tests.support.stack import GatewayProcess, Server

TOKENS = 5


def over_http(gateway: GatewayProcess) -> str:
    body = json.dumps({"model": "default", **chat_request(TOKENS)}).encode()
    request = urllib.request.Request(f"{gateway.base_url}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def by_client(client: SyncClient) -> str:
    return json.dumps(client.result(client.submit(chat_request(TOKENS)).id, timeout=30))


def by_command(url: str) -> str:
    command = [sys.executable, "-m", "sluice.cli", "submit", "--redis-url", url, "--wait", "--file", "-"]
    done = subprocess.run(command, input=json.dumps(chat_request(TOKENS)), capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.slow
def test_gateway_blocking_client_and_command_go_on_after_a_failover() -> None:
    with (
        Server(args=("--repl-diskless-sync-delay", "0")) as primary,
        replica_of(primary) as replica,
        Sentinels(primary) as sentinels,
        paced_worker(sentinels.url),
        GatewayProcess(sentinels.url) as gateway,
        SyncClient(sentinels.url) as client,
    ):
        sentinels.until(lambda: is_copied(replica))
        ways: list[Callable[[], str]] = [
            lambda: over_http(gateway),
            lambda: by_client(client),
            lambda: by_command(sentinels.url),
        ]
        assert [expected_text(TOKENS) in way() for way in ways] == [True] * 3
        sentinels.fail_over()
        assert sentinels.primary_port() == replica.port
        assert [expected_text(TOKENS) in way() for way in ways] == [True] * 3
