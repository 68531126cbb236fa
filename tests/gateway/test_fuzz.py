"""Bodies and headers of any kind at each route: an answer in time, and no error of the gateway's own."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from sluice import Client
from sluice.gateway import ServeSettings, app
from tests.gateway.gateways import HttpGateway
from tests.selection import examples

NO_WORKER = 503
FIELDS = """messages model stream stream_options n seed stop max_tokens max_completion_tokens tools tool_choice logprobs
response_format service_tier on_disconnect user tenant metadata input instructions previous_response_id background store
text reasoning include truncation max_output_tokens system stop_sequences thinking cache_control prompt""".split()
HEADERS = """authorization x-api-key content-type last-event-id idempotency-key anthropic-version anthropic-beta origin
accept x-request-id""".split()
IDS = ["x", "chatcmpl-" + "0" * 32, "resp_" + "0" * 32, "a" * 200, "%00", "%2e%2e", "é", "%ff", "a%2Fb", "*", "-n9"]

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer", ""])
KINDS = st.sampled_from(
    ["text", "image_url", "input_text", "function", "custom", "tool_use", "tool_result", "message", "image"]
)
JSON = st.recursive(
    SCALARS | st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=5)}),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*FIELDS, "type", "role", "content", "name", "id"]), inner, max_size=5)
        | st.fixed_dictionaries({"type": KINDS, "text": inner, "content": inner, "function": inner})
        | st.fixed_dictionaries({"role": ROLES, "content": inner})
    ),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6) | JSON | st.binary(max_size=200)
VALUES = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60)


async def routes(redis_url: str) -> list[tuple[str, str]]:
    """Return the methods and paths of all routes."""
    async with Client(redis_url) as client:
        found = [route for route in app(client, ServeSettings(_env_file=None)).routes if isinstance(route, Route)]
    return sorted({(method, route.path) for route in found for method in route.methods or ()})


@pytest.fixture
async def known(redis_url: str) -> list[tuple[str, str]]:
    """The methods and paths of all routes."""
    return await routes(redis_url)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_no_request_fails_on_the_gateway_or_hangs(
    gateway: HttpGateway, known: list[tuple[str, str]], data: st.DataObject
) -> None:
    method, path = data.draw(st.sampled_from(known))
    id = data.draw(st.sampled_from(IDS))
    url = path.replace("{id:path}", id).replace("{id}", id)
    body: Any = data.draw(BODIES)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = data.draw(st.dictionaries(st.sampled_from(HEADERS), VALUES, max_size=4))
    query = data.draw(
        st.sampled_from(["", "?stream=true", "?starting_after=-1&stream=true", "?limit=x", "?include_usage=1"])
    )
    # Certificates take longer to load than the request takes.
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, verify=False) as http:
        answer = await http.request(method, url + query, headers=headers, content=content)
    assert answer.status_code < 500 or answer.status_code == NO_WORKER, (method, url, body, answer.text)
    if answer.status_code >= 400 and method != "HEAD":
        assert "error" in answer.json(), (method, url, answer.text)


def test_the_routes_are_found(known: list[tuple[str, str]]) -> None:
    assert {("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/")} <= {*known}


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"messages":' * 50_000, b'{"messages": [' + b"{}," * 300_000 + b"{}]}"]
)
async def test_a_nested_or_a_wide_body_is_refused(http: httpx.AsyncClient, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"):
        answer = await http.post(path, content=body)
        assert 400 <= answer.status_code < 500 or answer.status_code == NO_WORKER, path
