"""A gateway without keys answers only to its own machine."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from sluice.gateway.protection import LocalOnly, is_loopback
from sluice.gateway.settings import CannotServe, read_serve_settings
from tests.gateway.gateways import gateway_process
from tests.support.stack import GatewayProcess


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.1", "::1", "[::1]", "app.localhost"])
def test_a_name_or_an_address_of_this_machine_is_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "127.0.0.1.nip.io", "127"])
def test_any_other_host_is_not(host: str) -> None:
    assert not is_loopback(host)


def answer(headers: dict[str, str], origins: frozenset[str] = frozenset()) -> int:
    inner = Starlette(routes=[Route("/", lambda request: PlainTextResponse("in"))])
    return TestClient(LocalOnly(inner, origins)).get("/", headers=headers).status_code


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "LocalHost."}, 200),
        ({"host": "[::1]:8000", "origin": "http://localhost:3000"}, 200),
        ({"host": "rebound.example:8000"}, 403),
        ({"host": ""}, 403),
        ({"host": "[bad"}, 403),
        ({"host": "localhost", "origin": "https://evil.example"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
    ],
)
def test_other_names_and_other_sites_pages_are_refused(headers: dict[str, str], status: int) -> None:
    assert answer(headers) == status


def test_a_site_that_the_settings_name_is_let_in() -> None:
    headers = {"host": "localhost", "origin": "https://a.example"}
    assert [answer(headers, frozenset({each})) for each in ("https://a.example", "*", "https://b.example")] == [
        200,
        200,
        403,
    ]


def test_another_host_without_keys_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CannotServe, match=r"^SLUICE_SERVE_HOST: without keys .* `sluice keys create`"):
        read_serve_settings(host="0.0.0.0")
    assert read_serve_settings(host="0.0.0.0", keys="keys.json").host == "0.0.0.0"


@pytest.fixture
def process(redis_url: str) -> Iterator[GatewayProcess]:
    with gateway_process(redis_url) as gateway:
        yield gateway


def test_a_gateway_without_keys_says_so_and_refuses_a_rebound_name(process: GatewayProcess) -> None:
    assert "no keys are set" in process.log()
    assert httpx.get(process.url, headers={"host": "rebound.example"}).status_code == 403


def test_a_gateway_with_a_broken_key_file_does_not_start(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("{")
    with pytest.raises(RuntimeError, match="SLUICE_SERVE_KEYS: .*keys.json: Invalid JSON"):  # noqa: SIM117
        with gateway_process(redis_url, keys=tmp_path / "keys.json"):
            pass
