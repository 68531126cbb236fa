"""`/v1/embeddings`: a request is one job of an embedding model. Its result has base64; numbers are made of it here."""

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.gateway.body import in_thread_if_long, json_response
from sluice.gateway.errors import endpoint
from sluice.gateway.gateway import Gateway
from sluice.gateway.idempotency import expired
from sluice.gateway.jobs import AnswerJobs, Available, StoredAnswer
from sluice.gateway.monitoring import identify
from sluice.gateway.protection import HeldBytes
from sluice.gateway.sse import unless_disconnected
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError
from sluice.interfaces.fields import requested_model
from sluice.openai import vectors_of

_PATH = "/v1/embeddings"


def routes(gateway: Gateway) -> list[Route]:
    """Return the route of embeddings."""

    async def create(request: Request) -> Response:
        started, caller = time.monotonic(), await gateway.authenticate(request)
        body = await gateway.read_body(request, caller, lambda content: (content, []))
        as_numbers = body.content.get("encoding_format") in (None, "float")
        asked = body.content | ({"encoding_format": "base64"} if as_numbers else {})

        async def submit(jobs: AnswerJobs) -> None:
            await gateway.submission.submit(caller, {jobs.ids[0]: asked}, jobs, function="embed")

        async def join(jobs: AnswerJobs, stored: StoredAnswer) -> None:
            if stored.available is Available.NOTHING:
                raise expired("the answer has expired; use a new key to have it computed again.")
            caller.held.release()
            caller.held.add(stored.result_bytes)

        accepting = gateway.accept(
            request, caller, body, _PATH, f"embd-{uuid.uuid4().hex}", submit=submit, join=join,
            continues=body.content.get("on_disconnect") == "continue",
        )  # fmt: skip
        jobs, _ = await unless_disconnected(request, accepting)
        identify(request, jobs.ids[0])
        timer = gateway.timer(requested_model(body.content), started, stream=False)
        result = await gateway.whole(request, jobs, gateway.jobs.result(jobs.ids[0], timer=timer))
        length = sum(len(each["embedding"]) for each in result["data"])
        _hold(caller.held, length * 5 if as_numbers else length)  # a number is 4 times as long as in base64
        if not as_numbers:
            return await json_response(result)
        return Response(await in_thread_if_long(length, _with_numbers, result), media_type="application/json")

    return [Route(_PATH, endpoint(create), methods=["POST"])]


def _hold(held: HeldBytes, length: int) -> None:
    """Hold the bytes of an answer in place of those that were counted before. Raises `ApiError`: 400 for more than a
    request can ever hold, since a retry would compute it again, and as `HeldBytes.add`."""
    held.release()
    if held.is_too_long(length):
        message = f"The answer would take {length:,} bytes here; send fewer inputs, or encoding_format base64."
        raise ApiError(ErrorForm.TOO_LARGE, message, param="input")
    held.add(length)


def _with_numbers(result: Mapping[str, Any]) -> bytes:
    """Return the result as JSON with numbers. An entry at a time: other threads run between them."""
    entries = [
        json.dumps({**entry, "embedding": vector}, separators=(",", ":"))
        for entry, vector in zip(result["data"], vectors_of(result), strict=True)
    ]
    rest = json.dumps({name: value for name, value in result.items() if name != "data"}, separators=(",", ":"))
    return f'{rest[:-1]},"data":[{",".join(entries)}]}}'.encode()
