"""Endpoints of lines: what any body becomes, and lines with a common prompt prefix stay together."""

import json
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice import Batch
from sluice.batch import endpoints
from sluice.batch.endpoints import ENDPOINTS
from sluice.batch.source import Source, sorted_for_reuse
from sluice.interfaces.errors import ApiError
from tests.batch.helpers import ANY, line, scan, write

URLS = st.sampled_from([*ENDPOINTS])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["input", "messages", "tools", "tool_choice", "text", "reasoning", "max_tokens", "background", "system", "stream",
     "previous_response_id", "encoding_format", "instructions", "metadata", "response_format", "model"]
)  # fmt: skip
TURNS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": JSON}))


@given(URLS, st.dictionaries(FIELDS, JSON | TURNS, max_size=6))
def test_any_body_becomes_a_job_or_is_refused_with_a_field_and_a_sentence(url: str, body: dict[str, Any]) -> None:
    endpoint = ENDPOINTS[url]
    try:
        job = endpoint.as_job(body)
    except ApiError as error:
        status, told = endpoint.error(error, "batch_1-1")
        assert status in (400, 413)
        assert told["error"]["message"]
    else:
        assert json.loads(json.dumps(job)) == job


def asks(url: str, document: str, question: str) -> dict[str, Any]:
    """Return a body whose prompt begins with the document."""
    match url:
        case "/v1/responses":
            return {"input": question, "instructions": document}
        case "/v1/embeddings":
            return {"input": document + question}
        case "/v1/messages":
            return {"messages": [{"role": "user", "content": question}], "max_tokens": 9, "system": document}
    return {"messages": [{"role": "system", "content": document}, {"role": "user", "content": question}]}


@given(URLS, st.lists(st.tuples(st.integers(0, 3), st.text(max_size=200)), max_size=12), st.booleans())
def test_lines_with_a_common_prefix_run_next_to_each_other(
    tmp_path_factory: pytest.TempPathFactory, url: str, asked: list[tuple[int, str]], backwards: bool
) -> None:
    documents = [f"{k} {'word ' * 60}" for k in range(4)]
    many = []
    for number, (k, question) in enumerate(asked):
        body = {"temperature": number / 100, **asks(url, documents[k], question)}
        if backwards:  # the order of the fields in the file is not that of the prompt
            body = dict(reversed(body.items()))
        many.append(line(f"{k}-{number}", url=url, body=body))
    path = write(tmp_path_factory.mktemp("lines") / "in.jsonl", *many)
    with Source(path, ANY) as source:
        order = [source.request(each).custom_id[0] for each in sorted_for_reuse(source.scan().lines)]
    assert len(list(groupby(order))) == len(set(order))


def test_a_line_that_is_not_of_the_batch_s_endpoint_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", line("a"))
    with Source(path, ANY, url="/v1/responses") as source:
        (problem,) = source.scan().problems
    assert (problem.code, problem.line) == ("mixed_urls", 1)
    assert problem.message.startswith("the url is /v1/chat/completions, and the batch's endpoint is /v1/responses")


def test_without_pydantic_lines_for_messages_are_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "find_spec", lambda name: None if name == "pydantic" else find_spec(name))
    path = write(tmp_path / "in.jsonl", line("a", url="/v1/messages", body={"messages": [], "max_tokens": 1}))
    (problem,) = scan(path).problems
    assert problem.message == "url: lines for /v1/messages need pydantic; install mlx-sluice[cli]."


def test_a_status_of_an_earlier_version_is_of_chat_completions() -> None:
    raw = {
        "id": "batch_0123456789ab", "input_file_id": "in.jsonl", "completion_window": "24h", "status": "completed",
        "created_at": 1, "request_counts": {"total": 1, "completed": 1, "failed": 0},
    }  # fmt: skip
    assert Batch.from_json(json.dumps(raw)).endpoint == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": "a", "conversation": "conv_1"}, "conversation"),
    ],
)
def test_a_line_can_neither_have_nor_continue_a_stored_response(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        ENDPOINTS["/v1/responses"].as_job(body)
    assert (refused.value.form.status, refused.value.param) == (400, param)
