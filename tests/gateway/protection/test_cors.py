"""Pages of other web sites: which of them a browser lets call the gateway."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from sluice.gateway import ServeSettings
from sluice.gateway.key_file import key_digest
from tests.gateway.gateways import serving

pytestmark = pytest.mark.usefixtures("fake_worker")

PATH = "/v1/chat/completions"
SITE, OTHER_SITE = "https://a.example", "https://b.example"
CHAT = {"messages": [{"role": "user", "content": "Hi."}], "say": ["1"]}
ALLOWED = "access-control-allow-origin"


@pytest.fixture
async def named(redis_url: str, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway with a key that names one site."""
    key_file = tmp_path / "keys.json"
    key_file.write_text(json.dumps({"keys": [{"id": "a", "sha256": key_digest("a-key"), "tenant": "a"}]}))
    settings = ServeSettings(_env_file=None, keys=key_file, cors_origins=SITE)
    with serving(redis_url, settings) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            yield http


async def preflight(http: httpx.AsyncClient, origin: str) -> httpx.Response:
    headers = {"origin": origin, "access-control-request-method": "POST"}
    return await http.options(PATH, headers={**headers, "access-control-request-headers": "authorization"})


def cors_headers(answer: httpx.Response) -> list[str]:
    return [name for name in answer.headers if name.startswith("access-control-")]


async def test_by_default_no_answer_and_no_preflight_lets_a_site_in(redis_url: str) -> None:
    with serving(redis_url, ServeSettings(_env_file=None)) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            bodies = [CHAT, {**CHAT, "stream": True}]
            answers = [await http.post(PATH, json=body, headers={"origin": SITE}) for body in bodies]
            answers.append(await preflight(http, SITE))
    assert [answer.status_code for answer in answers] == [200, 200, 405]
    assert [cors_headers(answer) for answer in answers] == [[], [], []]


@pytest.mark.parametrize(("origin", "allowed"), [(SITE, SITE), (OTHER_SITE, None)])
@pytest.mark.parametrize(
    ("key", "stream", "status"), [("a-key", False, 200), ("a-key", True, 200), ("wrong", True, 401)]
)
async def test_the_site_that_is_named_and_no_other_may_read_answers_streams_and_errors(
    named: httpx.AsyncClient, origin: str, allowed: str | None, key: str, stream: bool, status: int
) -> None:
    headers = {"origin": origin, "authorization": f"Bearer {key}"}
    answer = await named.post(PATH, json={**CHAT, "stream": stream}, headers=headers)
    assert (answer.status_code, answer.headers.get(ALLOWED)) == (status, allowed)


async def test_a_preflight_of_the_site_that_is_named_and_of_no_other_is_granted(named: httpx.AsyncClient) -> None:
    granted, refused = [await preflight(named, site) for site in (SITE, OTHER_SITE)]
    assert (granted.status_code, granted.headers[ALLOWED]) == (200, SITE)
    assert "authorization" in granted.headers["access-control-allow-headers"].lower()
    assert (refused.status_code, ALLOWED in refused.headers) == (400, False)
