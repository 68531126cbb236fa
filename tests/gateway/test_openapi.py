"""The document of `/openapi.json` describes the gateway's routes and takes what clients send."""

from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from docs.openapi.document import FILE, document, text
from sluice import Client
from sluice.gateway import ServeSettings, app
from sluice.interfaces.responses.request import KNOWN
from tests.gateway.messages.bodies import CLAUDE_CODE
from tests.gateway.responses.codex import turn
from tests.gateway.test_fuzz import routes

DOCUMENT = document()
SCHEMAS = DOCUMENT["components"]["schemas"]


def schema(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}


def test_the_file_is_what_the_models_make() -> None:
    assert FILE.read_text() == text(), "run python -m docs.openapi"


async def test_it_has_each_route_of_the_gateway_and_no_other(redis_url: str) -> None:
    served = {(method, path.replace("{id:path}", "{id}")) for method, path in await routes(redis_url)}
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert {route for route in served if route[0] != "HEAD" and "/page/" not in route[1]} == described


async def test_it_is_served_without_a_key_and_names_the_place_of_the_application(redis_url: str) -> None:
    async with Client(redis_url) as client:
        gateway = app(client, ServeSettings(_env_file=None))
        with TestClient(Starlette(routes=[Mount("/llm", gateway)])) as http:
            assert http.get("/llm/openapi.json").json() == {**DOCUMENT, "servers": [{"url": "/llm"}]}
        with TestClient(gateway) as http:
            assert http.get("/openapi.json").json() == DOCUMENT


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_schema_is_a_valid_one(name: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[name])


def test_a_response_takes_the_fields_that_the_gateway_takes() -> None:
    assert SCHEMAS["ResponseRequest"]["properties"].keys() == KNOWN


@pytest.mark.parametrize("name", CLAUDE_CODE)
def test_it_accepts_the_requests_of_claude_code(name: str) -> None:
    Draft202012Validator(schema("MessagesBody")).validate(CLAUDE_CODE[name])


async def test_what_the_gateway_answers_is_what_it_describes(real_http: httpx.AsyncClient) -> None:
    said = {"messages": [{"role": "user", "content": "Hi."}]}
    asked = {
        ("post", "/v1/chat/completions"): said,
        ("post", "/v1/messages"): {**said, "model": "default", "max_tokens": 5},
        ("post", "/v1/responses"): {"input": "Hi."},
        ("get", "/v1/models"): None,
        ("get", "/v1/models/{id}"): None,
    }
    for (method, path), body in asked.items():
        answer = await real_http.request(method, path.replace("{id}", "default"), json=body)
        assert answer.status_code == 200, (path, answer.text)
        content = DOCUMENT["paths"][path][method]["responses"]["200"]["content"]["application/json"]
        Draft202012Validator({**content["schema"], "components": DOCUMENT["components"]}).validate(answer.json())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_its_errors_are_those_of_the_gateway(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(path, content=b"[]")
    content = DOCUMENT["paths"][path]["post"]["responses"]["default"]["content"]["application/json"]
    Draft202012Validator({**content["schema"], "components": DOCUMENT["components"]}).validate(answer.json())


def test_it_accepts_a_turn_of_codex_without_its_hosted_tools() -> None:
    body = turn()
    body["tools"] = [tool for tool in body["tools"] if tool["type"] != "tool_search"]
    Draft202012Validator(schema("ResponseRequest")).validate(body)
