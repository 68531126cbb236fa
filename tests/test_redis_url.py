"""A URL's password appears nowhere: not in a sentence, not in a log, not on a terminal, however odd the URL is."""

import logging
import sys
import traceback
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio.connection import SSLConnection
from redis.asyncio.sentinel import SentinelConnectionPool

from sluice import Client
from sluice.cli.app import run
from sluice.contract.redis_url import Sentinels, Servers, redacted, sentinels_of, url_error
from sluice.transport import connect
from tests.fakes import FakeChat
from tests.queue.helpers import settings, until, working
from tests.support.stack import free_port
from worker.environment import variable
from worker.errors import CannotStart
from worker.queue.redis_server import redis_from_settings
from worker.settings import Settings, read_settings

# Every word of four letters or digits that is a part of a password. No other part of these URLs or sentences has one.
SECRETS = ("kumquat", "zebra", "48151", "62342")
UNREADABLE = [
    "redis://:kumquat@localhost:abc/0",
    "redis://:kumquat@localhost:zebra/0",
    "redis://:kumquat@localhost:99999/0",
    "redis://:kumquat@localhost:-1/0",
    "redis://:kumquat@localhost:6379:6379/0",
    "redis://:kumquat/zebra@localhost:6379/0",
    "redis://:48151/62342@localhost:6379/0",
    "redis://:kumquat#zebra@localhost:6379/0",
    "redis://:48151#62342@localhost:6379/0",
    "redis://:kumquat?zebra@localhost:6379/0",
    "redis://:48151?62342@localhost:6379/0",
    "redis://:48151?zebra=kumquat@localhost:6379/0",
    "redis://:kumquat[zebra@localhost:6379/0",
    "redis://:[kumquat]@localhost:6379/0",
    "redis://:kum\u2100kumquat@localhost:6379/0",
    "redis://:kumquat\nzebra@localhost:6379/0",
    "redis://:kumquat@localhost:6379/0?zebra=1",
    "redis://:kumquat@localhost:6379/0?zebra",
    "redis://:kumquat@localhost:6379/0?db=zebra",
    "redis://:kumquat@localhost:6379/0?socket_timeout=zebra",
    "redis://:kumquat@localhost:6379/0?protocol=zebra",
    "redis://:kumquat@localhost:6379/0?protocol=9",
    "redis://:kumquat@localhost:6379/0?retry=zebra",
    "redis://:kumquat@localhost:6379/0?encoding=zebra",
    "redis://:kumquat@localhost:6379/0?decode_responses=true",
    "redis://:kumquat@localhost:6379/zebra",
    "redis://localhost:6379/0?password=kumquat&db=zebra",
    "redis://localhost:6379/0?password=kum@kumquat&zebra=1",
    "rediss://:kumquat@localhost:6379/0?ssl_cert_reqs=zebra",
    "unix://:kumquat@/tmp/none.sock?zebra=1",
    "redis://user:zebra",
    "http://:kumquat@localhost:6379/0",
    "redis:/:kumquat@localhost:6379/0",
    ":kumquat@localhost:6379",
    "REDIS://:kumquat@localhost",
    "redis+sentinel://:kumquat@localhost:6379",
    "redis+sentinel://:kumquat@localhost:6379/",
    "redis+sentinel://:kumquat@localhost:6379/a/zebra",
    "redis+sentinel://:kumquat@localhost:6379,localhost:zebra/a",
    "redis+sentinel://:kumquat@localhost:6379,:6379/a",
    "redis+sentinel://:kumquat/zebra@localhost:6379/a",
    "redis+sentinel://:kumquat@localhost:6379/a?zebra=1",
    "rediss+sentinel://:kumquat@localhost:6379/a?ssl_cert_reqs=zebra",
]
NOT_THERE = [
    "redis://:kumquat@localhost:{port}/0",
    "redis://zebra:kumquat@localhost:{port}/0",
    "redis://:kumquat@zebra@localhost:{port}/0",
    "redis://:kumquat:zebra@localhost:{port}/0",
    "redis://:kumquat%2Fzebra@localhost:{port}/0",
    "redis://:kumquat zebra@localhost:{port}/0",
    "redis://localhost:{port}/0?password=kumquat",
    "redis://localhost:{port}/0?username=zebra&password=kumquat%26zebra",
    "redis://localhost:{port}/0?password=48151@62342",
    "unix://:kumquat@/tmp/sluice-none-{port}.sock",
    "unix:///tmp/sluice-none-{port}.sock?password=kumquat",
    "redis+sentinel://:kumquat@localhost:{port},[::1]:{port}/a",
    "redis+sentinel://:kumquat,zebra@localhost:{port}/a/0?sentinel_password=zebra",
    "rediss+sentinel://zebra:kumquat@localhost:{port}/a",
]


def refuse_secrets(text: str) -> None:
    assert not [secret for secret in SECRETS if secret in text], text


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in map(variable, Settings.model_fields):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=[*UNREADABLE, *NOT_THERE])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.param).format(port=free_port())


def command(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sluice", *args])
    with pytest.raises(SystemExit) as ended:
        run()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("args", [["workers"], ["batch", "feed", "runs"], ["batch", "run", "in", "-o", "out"]])
def test_a_command_tells_no_password(
    url: str, args: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLUICE_REDIS_URL", url)
    code = command(monkeypatch, *args)
    out, err = capfd.readouterr()
    refuse_secrets(out + err)
    assert (code, len(err.splitlines())) == (2, 1), err


@pytest.mark.parametrize("bad", UNREADABLE)
@pytest.mark.parametrize("args", [["worker"], ["check", "some/model"], ["batch", "schedule"]])
def test_a_command_of_the_worker_tells_no_password(
    bad: str, args: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLUICE_REDIS_URL", bad)
    monkeypatch.setenv("SLUICE_MODEL", "./no/such/folder")
    monkeypatch.setenv("SLUICE_MAX_ROWS", "none")
    code = command(monkeypatch, *args)
    refuse_secrets("".join(capfd.readouterr()))
    assert code == 2


def started(url: str) -> str:
    """Return the error with which a worker refuses this URL; empty if it would start to wait for its server."""
    try:
        redis_from_settings(read_settings(model="none", redis_url=url))
    except CannotStart as error:
        return str(error)
    return ""


@pytest.mark.parametrize("bad", UNREADABLE)
def test_a_worker_with_a_url_that_cannot_be_read_is_told_so(bad: str) -> None:
    refuse_secrets(started(bad))
    assert started(bad).startswith("SLUICE_REDIS_URL=")


@pytest.mark.parametrize("bad", UNREADABLE)
async def test_a_client_with_a_url_that_cannot_be_read_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        Client(bad)
    refuse_secrets("".join(traceback.format_exception(raised.value, limit=0)))


@pytest.mark.parametrize("away", NOT_THERE)
async def test_a_worker_that_waits_for_its_server_logs_no_password(away: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    given = settings(away.format(port=free_port()))
    async with working(given, FakeChat().chat):
        await until(lambda: "waiting for redis" in caplog.text)
    refuse_secrets(caplog.text + repr(given))


LOCAL = "localhost:6379/0"
CHARACTERS = st.text(st.sampled_from("/?#@[]:%&=\\ +\u2100\n\"'") | st.characters(codec="utf-8"), max_size=6)


@given(st.lists(CHARACTERS, min_size=2, max_size=3), st.sampled_from(SECRETS), st.sampled_from(SECRETS))
def test_whatever_stands_in_a_password_none_of_it_is_shown(odd: list[str], first: str, second: str) -> None:
    password = "".join((odd[0], first, odd[1], second, *odd[2:]))
    for url in (
        f"redis://:{password}@{LOCAL}",
        f"redis://user:{password}@{LOCAL}",
        f"redis://{LOCAL}?password={password}",
        f"redis+sentinel://:{password}@localhost:1,localhost:2/a/0",
        f"redis+sentinel://localhost:1/a?sentinel_password={password}",
        f"http://:{password}@{LOCAL}",
        f":{password}@{LOCAL}",
        f"{LOCAL}?password={password}",
    ):
        refuse_secrets(redacted(url))
        refuse_secrets(url_error(url) or "")


@given(st.lists(CHARACTERS, min_size=2, max_size=3))
def test_a_url_without_a_problem_leads_to_its_server_and_nowhere_else(odd: list[str]) -> None:
    """Else the server's name in an error would be a part of the password."""
    url = f"redis://:{'kumquat'.join(odd)}@{LOCAL}"
    if url_error(url) is None:
        try:
            parts = urlsplit(url)
        except ValueError:
            return  # it may quote the password, and what it says is told to nobody
        assert (parts.hostname, parts.port, parts.path) == ("localhost", 6379, "/0")


def test_sentinels_are_read_of_a_url() -> None:
    url = "redis+sentinel://user:a%2Cb@one:1,[::1],three/my-service/2?client_name=c"
    assert url_error(url) is None
    addresses = (("one", 1), ("::1", 26_379), ("three", 26_379))
    assert sentinels_of(url) == Sentinels(addresses, "my-service", "redis://user:a%2Cb@one:1/2?client_name=c")
    assert sentinels_of("redis://one:1/0") is None


async def test_each_part_of_a_url_reaches_the_servers_or_the_sentinels() -> None:
    url = "rediss+sentinel://u:p@one:1,two:2/s/3?ssl_cert_reqs=none&sentinel_password=q&socket_timeout=9"
    async with connect(url) as server:
        pool = server.connection_pool
        assert isinstance(pool, SentinelConnectionPool)
        given = pool.connection_kwargs
        assert (given["username"], given["password"], given["db"], given["socket_timeout"]) == ("u", "p", 3, 9.0)
        assert (pool.service_name, given["ssl_cert_reqs"]) == ("s", "none")
        assert issubclass(pool.connection_class, SSLConnection)
        asked = [each.connection_pool for each in pool.sentinel_manager.sentinels]
        assert [(each.connection_kwargs["host"], each.connection_kwargs["port"]) for each in asked] == [
            ("one", 1),
            ("two", 2),
        ]
        assert {each.connection_kwargs["password"] for each in asked} == {"q"}
        assert all(issubclass(each.connection_class, SSLConnection) for each in asked)


def test_what_is_no_secret_is_shown() -> None:
    assert redacted("redis+sentinel://u:kumquat@a:1,b:2/s/0?c=d") == "redis+sentinel://***@a:1,b:2/s/0"
    assert redacted("redis+sentinel://a:1,b:zebra/s s") == "redis+sentinel://a:1,b:***/***"
    assert redacted("redis://localhost:6379/0") == "redis://localhost:6379/0"
    assert redacted("redis://user:kumquat@[::1]:6379/12") == "redis://***@[::1]:6379/12"
    assert redacted("unix://:kumquat@/run/redis.sock?db=1") == "unix://***@/run/redis.sock"
    assert redacted("localhost:16379/0") == "localhost:16379/0"
    assert redacted("user:kumquat@localhost:16379") == "***@localhost:16379"
    assert redacted("http://user:kumquat@localhost:16379") == "http://***@localhost:16379"
    assert redacted("valkey://localhost") == "valkey://localhost"
    assert redacted("kumquat") == redacted("localhost:kumquat") == redacted("localhost:1?password=a@kumquat:1") == "***"
    assert redacted("") == ""
    assert redacted("redis://:kumquat@localhost:zebra/0") == "redis://***@localhost:***/0"
    assert [
        url_error(url) for url in ("redis://", "redis://h/", "rediss://u:p@h:1/2/", "unix:///a@b", "redis://h?db=1")
    ] == [None] * 5


# A map of servers

MAP = """
default = "redis://:kumquat@queue-1/0"
[models]
big = "rediss://:zebra@queue-2:6380/0"
"qwen3.5" = "rediss://:zebra@queue-2:6380/0"
"""


def map_file(folder: Path, text: str) -> Path:
    path = folder / "servers.toml"
    path.write_text(text)
    return path


def test_a_map_names_the_server_of_a_model_and_of_all_others(tmp_path: Path) -> None:
    servers = Servers.read(map_file(tmp_path, MAP))
    found = {model: servers.of_model(model) for model in ("big", "qwen3.5", "default")}
    first, second = "redis://:kumquat@queue-1/0", "rediss://:zebra@queue-2:6380/0"
    assert found == {"big": second, "qwen3.5": second, "default": first}
    assert servers.urls == (first, second)
    assert servers.describe(second) == "the server rediss://***@queue-2:6380/0 of big, qwen3.5"
    assert servers.describe(first) == "the server redis://***@queue-1/0 of all models that are not named"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "`default` is missing"),
        ("default = 5", "default must be the URL of a server"),
        ('default = ":kumquat@queue-1"', "default is not the URL of a server: it must begin with redis://"),
        ('default = "http://:kumquat@queue-1"', "default is not the URL of a server: it must begin with redis://"),
        ('default = "redis://queue-1"\nbig = "redis://queue-2"', "'big' is unknown"),
        ('default = "redis://queue-1"\nmodels = "big"', "`models` must be a table"),
        ('default = "redis://queue-1"\n[models]\nbig = ["redis://queue-2"]', "big must be the URL of a server"),
        ('default = "redis://queue-1"\n[models]\nqwen3.5 = "redis://queue-2"', "'qwen3' is a table; a name with"),
        ('default = "redis://queue-1"\n[models]\n"a b" = "redis://queue-2"', "'a b' is not a model's name"),
        ('default = "redis://queue-1"\n[models]\n"redis://:kumquat@b" = "big"', "*** is not a model's name"),
        ('default = "redis://queue-1"\n[models]\nbig = "redis://a"\nbig = "redis://b"', "has a name twice"),
        ('default = "redis://:kumquat', "it is no TOML"),
    ],
)
def test_a_broken_map_is_explained_without_a_password(tmp_path: Path, text: str, problem: str) -> None:
    path = map_file(tmp_path, text)
    with pytest.raises(ValueError, match="servers.toml: ") as refused:
        Servers.read(path)
    assert problem in str(refused.value)
    assert [secret for secret in SECRETS if secret in str(refused.value)] == []


def test_a_map_that_is_no_file_or_no_text_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it cannot be read: No such file"):
        Servers.read(tmp_path / "none.toml")
    (tmp_path / "servers.toml").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="no text in UTF-8"):
        Servers.read(tmp_path / "servers.toml")


def test_a_worker_takes_the_server_of_its_model_unless_an_option_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_REDIS_URLS", str(map_file(tmp_path, MAP)))
    monkeypatch.setenv("SLUICE_REDIS_URL", "redis://elsewhere")
    of_big = read_settings(model="none", model_name="big", _env_file=None)
    assert (of_big.redis_url, of_big.server.endswith("servers.toml: rediss://***@queue-2:6380/0")) == (
        "rediss://:zebra@queue-2:6380/0", True,
    )  # fmt: skip
    assert read_settings(model="none", _env_file=None).redis_url == "redis://:kumquat@queue-1/0"
    chosen = read_settings(model="none", model_name="big", redis_url="redis://here", _env_file=None)
    assert (chosen.redis_url, chosen.redis_urls) == ("redis://here", None)
    monkeypatch.setenv("SLUICE_REDIS_URLS", "")
    assert read_settings(model="none", _env_file=None).redis_url == "redis://elsewhere"
    monkeypatch.setenv("SLUICE_REDIS_URLS", str(tmp_path / "none.toml"))
    with pytest.raises(CannotStart, match="SLUICE_REDIS_URLS=.*none.toml: .*cannot be read"):
        read_settings(model="none", _env_file=None)
