"""Paths as clients with a wrong base URL send them."""

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from sluice import Client
from sluice.gateway import ServeSettings, app
from sluice.gateway.app import meant_path

CHAT = {"model": "default", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi."}], "say": ["a"]}


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat///completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("//v1//v1/v1/messages/", "/v1/messages"),
        ("/v1/models/", "/v1/models"),
        ("/v1/v1/models/s3://a/v1/v1/b/", "/v1/models/s3://a/v1/v1/b/"),
        ("/v1/models//x", "/v1/models/x"),
        ("/v10/v1/x", "/v10/v1/x"),
        ("/", "/"),
        ("//", "/"),
        ("", "/"),
    ],
)
def test_a_path_is_read_as_its_client_meant_it(path: str, meant: str) -> None:
    assert meant_path(path) == meant


@pytest.mark.usefixtures("fake_worker")
@pytest.mark.parametrize("base", ["//v1", "/v1/", "/v1/v1", "//v1/v1/"])
async def test_each_interface_answers_under_a_doubled_base(http: httpx.AsyncClient, base: str) -> None:
    answer = await http.post(f"{http.base_url}{base}/chat/completions", json=CHAT)
    assert (answer.status_code, answer.history) == (200, [])
    message = {name: CHAT[name] for name in ("model", "max_tokens", "messages")}
    assert (await http.post(f"{http.base_url}{base}/messages", json=message)).status_code == 200
    refused = await http.post(f"{http.base_url}{base}/messages", json={})
    assert refused.json()["type"] == "error"  # in Anthropic's form
    assert (await http.get(f"{http.base_url}{base}/models/default")).json()["id"] == "default"


async def test_a_path_without_v1_is_404_with_the_path(http: httpx.AsyncClient) -> None:
    refused = await http.post("/chat/completions", json=CHAT)
    assert refused.status_code == 404
    assert "The path is /v1/chat/completions: add /v1 to the base URL." in refused.json()["error"]["message"]
    assert "base URL" not in (await http.get("/v1/nothing")).json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/responses/compact", 404),
        ("POST", "/v1/responses/input_tokens", 404),
        ("POST", "/v1/chat/completions/x", 404),
        ("POST", "/v1/models/pull", 404),
        ("PUT", "/v1/responses/resp_1", 405),
        ("POST", "/v1/responses/resp_1/input_items", 405),
        ("GET", "/v1/responses", 405),
    ],
)
async def test_a_route_that_we_do_not_have_is_404_also_in_place_of_an_id(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    refused = await http.request(method, path, json={})
    assert (refused.status_code, refused.json()["error"]["type"]) == (status, "invalid_request_error")


@pytest.mark.usefixtures("fake_worker")
async def test_a_mounted_gateway_reads_the_paths_below_its_own(redis_url: str) -> None:
    async with Client(redis_url) as client:
        outer = Starlette(routes=[Mount("/llm", app(client, ServeSettings(_env_file=None)))])
        transport = httpx.ASGITransport(outer)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for path in ("/llm/v1/models", "/llm//v1/models", "/llm/v1/v1/models/"):
                assert (path, (await http.get(path)).status_code) == (path, 200)
            assert "add /v1" in (await http.post("/llm/messages")).json()["error"]["message"]
