"""Messages of the command about a server that it cannot use, and about its URL."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.end_to_end.test_cli import Command
from tests.queue.refusing import disk_full
from tests.support.stack import TINY_CHAT, Server, free_port
from tests.support.tls import TlsPort, certificate


@pytest.fixture(scope="module")
def open_server() -> Iterator[str]:
    """Host and port of a server without a password, and with a user that may not send PING."""
    with Server() as server, redis.Redis.from_url(server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "low", "on", ">kumquat", "~*", "&*", "+@all", "-ping")
        yield server.url.removeprefix("redis://").removesuffix("/0")


@pytest.fixture(scope="module")
def closed_server() -> Iterator[str]:
    """Host and port of a server with a password."""
    with Server(args=("--requirepass", "right"), password="right") as server:
        yield server.url.removeprefix("redis://").removesuffix("/0")


def refused(sluice: Command, url: str) -> str:
    """Return the error message, which is one line without the password."""
    code, out, err = sluice("workers", "--redis-url", url)
    assert (code, out, len(err.splitlines()), "kumquat" in err) == (2, "", 1, False), err
    assert not any(marks in err for marks in ("?.", "..", "!."))
    return err.removeprefix("sluice: ").rstrip("\n")


def test_a_password_that_is_missing_is_asked_for(sluice: Command, closed_server: str) -> None:
    assert refused(sluice, f"redis://{closed_server}/0") == (
        f"the server at redis://{closed_server}/0 refuses the connection: it requires a password; put it into the URL, "
        "as in redis://:PASSWORD@HOST:PORT/0."
    )


@pytest.mark.parametrize("credentials", [":kumquat", "eve:kumquat"])
def test_a_password_that_is_wrong_is_to_be_corrected(sluice: Command, closed_server: str, credentials: str) -> None:
    assert refused(sluice, f"redis://{credentials}@{closed_server}/0") == (
        f"the server at redis://***@{closed_server}/0 refuses the connection: it refuses the user or the password in "
        "the URL; correct them."
    )


def test_a_password_that_is_not_wanted_is_to_be_removed(sluice: Command, open_server: str) -> None:
    said = refused(sluice, f"redis://:kumquat@{open_server}/0")
    assert said.endswith("it has no password, and refuses the one in the URL; remove it from the URL.")


def test_an_unknown_user_of_a_server_that_wants_none_is_to_be_corrected_or_removed(
    sluice: Command, open_server: str
) -> None:
    assert refused(sluice, f"redis://eve:kumquat@{open_server}/0").endswith("correct or remove them.")


def test_a_denied_command_is_told_with_the_way_to_allow_it(sluice: Command, open_server: str) -> None:
    said = refused(sluice, f"redis://low:kumquat@{open_server}/0")
    assert "denies a command to its user" in said
    assert "ACL SETUSER" in said


async def test_a_full_disk_is_told_with_the_remedy_and_jobs_can_still_be_listed(sluice: Command) -> None:
    with Server() as server:
        async with disk_full(server):
            code, _, err = await asyncio.to_thread(sluice, "submit", "hi", "--redis-url", server.url)
            assert code == 2
            assert "it cannot write to its disk and refuses all writes; free space there" in err
            listed = await asyncio.to_thread(sluice, "queue", "list", "--redis-url", server.url)
            assert (listed[0], "no jobs" in listed[2]) == (0, True)


def test_a_server_without_a_free_connection_is_not_taken_for_one_that_is_away(sluice: Command) -> None:
    with Server() as server, redis.Redis.from_url(server.url) as admin:
        admin.config_set("maxclients", 1)
        assert "raise its maxclients" in refused(sluice, server.url)


def test_a_database_that_the_server_does_not_have_is_told(sluice: Command, open_server: str) -> None:
    assert "The URL must name an existing database" in refused(sluice, f"redis://{open_server}/99")


@pytest.mark.parametrize("command", [("chat", "hi"), ("submit", "hi"), ("tail", "a"), ("cancel", "a")])
def test_every_command_ends_at_once_without_its_database(
    sluice: Command, open_server: str, command: tuple[str, ...]
) -> None:
    code, _, err = sluice(*command, "--redis-url", f"redis://{open_server}/16")
    assert code == 2
    assert "The URL must name an existing database" in err


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (
            "redis://127.0.0.1:{port}/0",
            "no server answers at redis://127.0.0.1:{port}/0: no process listens there. `sluice up",
        ),
        ("unix:///nowhere/redis.sock", "no server answers at unix:///nowhere/redis.sock: the socket does not exist."),
        (
            "redis://nowhere.invalid:{port}",
            "no server answers at redis://nowhere.invalid:{port}: its host name is unknown.",
        ),
    ],
)
def test_a_server_that_is_not_there_is_named_with_the_reason(sluice: Command, url: str, why: str) -> None:
    port = free_port()
    assert refused(sluice, url.format(port=port)).startswith(why.format(port=port))


def test_a_server_without_tls_is_told_from_one_that_is_away(sluice: Command, open_server: str) -> None:
    assert "begin the URL with redis://" in refused(sluice, f"rediss://{open_server}/0")


def test_a_certificate_that_is_not_trusted_is_told(sluice: Command, open_server: str, tmp_path: Path) -> None:
    port, file = free_port(), certificate(tmp_path)
    with TlsPort(port, int(open_server.partition(":")[2]), file):
        assert "its certificate is refused: self-signed certificate" in refused(sluice, f"rediss://127.0.0.1:{port}/0")
        trusted = f"ssl_ca_certs={file}&ssl_check_hostname=true"
        assert "no worker is alive" in sluice("workers", "--redis-url", f"rediss://127.0.0.1:{port}/0?{trusted}")[2]
        said = refused(sluice, f"rediss://localhost:{port}/0?{trusted}")
        assert "'localhost'" in said
        assert said.count("Check ssl_ca_certs and the host in the URL.") == 1


def test_a_server_of_another_kind_is_told(sluice: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        other.settimeout(60)
        with sluice.running("workers", "--redis-url", f"redis://127.0.0.1:{port}") as process:
            caller, _ = other.accept()
            with caller:
                caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                assert "is not a Redis or Valkey. Check the host and the port." in process.communicate(timeout=60)[1]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("localhost:16379", "'localhost:16379'"),
        (":kumquat@localhost:16379/0", "'***@localhost:16379/0'"),
        ("http://:kumquat@localhost:16379", "'http://***@localhost:16379'"),
    ],
)
def test_a_url_with_another_scheme_or_none_is_shown_but_for_its_password(sluice: Command, url: str, shown: str) -> None:
    said = refused(sluice, url)
    assert said.startswith(f"{shown} is not the URL of a server: it must begin with redis://")


def test_an_empty_url_in_the_environment_is_none(sluice: Command, tmp_path: Path) -> None:
    sluice.env["SLUICE_REDIS_URL"] = ""
    assert sluice("check", str(TINY_CHAT))[0] == 0
    assert "***" not in sluice("workers")[2]
