"""Submits the jobs of a capture to a gateway, or to another server with OpenAI's interface."""

from typing import Any

import httpx

from sluice.capture.file import CapturedJob
from sluice.capture.replay import Answer, Outcome, compare

_PATHS = {"chat": "chat/completions", "embed": "embeddings"}


class GatewayError(Exception):
    """The server cannot be used, or is no gateway."""


async def replay_remotely(url: str, key: str | None, job: CapturedJob, request: dict[str, Any], model: str) -> Outcome:
    """Send a job's request again and compare. Raises `GatewayError`."""
    path = _PATHS.get(job.function)
    if path is None:
        return Outcome("skipped", "a gateway has no path for a count of tokens; replay it with --redis-url")
    recorded = Answer.of(job.events, job.result)
    streaming = ("stream", "stream_options")  # of the request as a gateway received it
    body = {**{name: value for name, value in request.items() if name not in streaming}, "model": model}
    if not recorded.is_whole and job.function == "chat":  # as far as it was recorded
        body = {**body, "max_tokens": max(1, len(recorded.tokens)), "max_completion_tokens": None}
    base = f"{url.rstrip('/').removesuffix('/v1')}/v1"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10.0)) as http:
            answer = await http.post(f"{base}/{path}", json=body, headers=headers)
            read = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
        raise GatewayError(f"{url} cannot be reached: {error or type(error).__name__}") from None
    except ValueError:
        raise GatewayError(f"{url} answers with {answer.status_code} and no JSON; it is no gateway") from None
    if answer.is_error:
        refusal = read.get("error") if isinstance(read, dict) else None
        message = str(refusal.get("message")) if isinstance(refusal, dict) else "no reason is given"
        if refusal is None or answer.status_code in (401, 403, 404, 429):
            raise GatewayError(f"{url} answers with {answer.status_code}: {message}")
        failed = {"type": "failed", "error": {"type": refusal.get("code") or refusal.get("type"), "message": message}}
        return compare(recorded, Answer.of([failed], None))
    try:
        return compare(recorded, Answer.of([], read))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise GatewayError(f"{url} answers with something else than a completion; it is no gateway") from None
