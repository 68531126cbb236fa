"""Gateway, clients, commands and offline runs go on after a failover, over TLS too."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from sluice import ServerUnreachable, SyncClient
from tests.support.chaos.harness import chat_request, paced_worker
from tests.support.chaos.paced import expected_text
from tests.support.sentinels import Sentinels, is_copied, replica_of
from tests.support.stack import GatewayProcess, Server, free_port
from tests.support.tls import TlsPort, certificate

TOKENS = 5


@dataclass(frozen=True)
class Encrypted:
    """`url` lacks the file of the authority at its end."""

    url: str
    authority: Path
    sentinels: Sentinels
    servers: list[TlsPort]
    watching: list[TlsPort]


def line(number: int) -> dict[str, object]:
    body = {"model": "default", **chat_request(TOKENS)}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


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


@pytest.mark.slow
def test_a_batch_run_goes_on_when_its_primary_dies(tmp_path: Path) -> None:
    lines = 120
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(line(number)) + "\n" for number in range(lines)))
    with (
        Server(args=("--repl-diskless-sync-delay", "0")) as primary,
        replica_of(primary) as replica,
        Sentinels(primary) as sentinels,
        paced_worker(sentinels.url, max_rows=4, step_ms=60),
    ):
        sentinels.until(lambda: is_copied(replica))
        command = [sys.executable, "-m", "sluice.cli", "batch", "run", str(file), "-o", str(out), "--json"]
        env = {**os.environ, "SLUICE_REDIS_URL": sentinels.url}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            try:
                sentinels.until(lambda: out.exists() and out.read_text().count("\n") >= 10)
                primary.kill()
                assert out.read_text().count("\n") < lines - 40, "too much was done before the failover"
                printed, said = run.communicate(timeout=120)
            finally:
                run.kill()
        assert run.returncode == 0, said
        assert json.loads(printed)["request_counts"] == {"total": lines, "completed": lines, "failed": 0}
        answers = [json.loads(each) for each in out.read_text().splitlines()]
        assert sorted(each["custom_id"] for each in answers) == sorted(f"r{number}" for number in range(lines))
        texts = {each["response"]["body"]["choices"][0]["message"]["content"] for each in answers}
        assert texts == {expected_text(TOKENS)}
        with SyncClient(sentinels.url) as client:
            assert client.queues() == []


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[Encrypted]:
    """A primary, a replica and three sentinels that clients reach by TLS alone."""
    file = certificate(tmp_path)
    first, second = free_port(), free_port()
    copying = ("--replicaof", "127.0.0.1", str(first), "--replica-announce-port", str(second))
    with ExitStack() as stack:
        primary = stack.enter_context(Server(args=("--repl-diskless-sync-delay", "0")))
        replica = Server(args=copying)
        ports = [
            stack.enter_context(TlsPort(port, of.port, file)) for port, of in ((first, primary), (second, replica))
        ]
        stack.enter_context(replica)
        sentinels = stack.enter_context(Sentinels(primary, port=first))
        watched = [stack.enter_context(TlsPort(free_port(), port, file)) for port in sentinels.ports]
        sentinels.until(lambda: is_copied(replica))
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in watched)
        url = f"rediss+sentinel://{hosts}/main/0?ssl_check_hostname=true&ssl_ca_certs="
        yield Encrypted(url, file, sentinels, ports, watched)


@pytest.mark.slow
def test_all_of_it_goes_over_tls_before_and_after_a_failover(encrypted: Encrypted) -> None:
    url = f"{encrypted.url}{encrypted.authority}"
    with (
        paced_worker(url, max_rows=4),
        GatewayProcess(url) as gateway,
        SyncClient(url) as client,
    ):
        ways: list[Callable[[], str]] = [lambda: over_http(gateway), lambda: by_client(client), lambda: by_command(url)]
        assert [expected_text(TOKENS) in way() for way in ways] == [True] * 3
        encrypted.sentinels.fail_over()
        assert encrypted.sentinels.primary_port() == encrypted.servers[1].port
        assert [expected_text(TOKENS) in way() for way in ways] == [True] * 3
    assert [each.by_tls > 3 for each in encrypted.servers] == [True, True]
    assert any(each.by_tls for each in encrypted.watching)


@pytest.mark.slow
def test_a_certificate_of_another_authority_is_refused(encrypted: Encrypted, tmp_path: Path) -> None:
    other = certificate(tmp_path, "other")
    with SyncClient(f"{encrypted.url}{other}", outage_s=0.1) as client, pytest.raises(ServerUnreachable):
        client.ping()
    assert [each.by_tls for each in encrypted.servers] == [0, 0]
