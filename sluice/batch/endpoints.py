"""The endpoints that lines are for: a line's body as a request of the contract, and the job's result or error as the
object that the endpoint answers with over HTTP."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from sluice.contract.batch import Url
from sluice.contract.keys import JobFunction
from sluice.errors import SluiceError
from sluice.interfaces.embeddings import in_base64, with_numbers
from sluice.interfaces.errors import ApiError, anthropic_body, from_client, openai_body
from sluice.interfaces.fields import refusal
from sluice.openai import error_reply

if TYPE_CHECKING:
    from sluice.interfaces.responses.record import NewResponse

LineBody = Mapping[str, Any]
MESSAGES: Url = "/v1/messages"


class Endpoint(Protocol):
    """One endpoint. Its methods take the body of a line, as the file has it."""

    url: Url
    function: JobFunction = "chat"
    prompt: Sequence[str]  # the fields of a body that the prompt is made of, in this order

    def missing(self) -> str | None:
        """Return why lines cannot be run in this environment; None if they can."""
        return None

    @abstractmethod
    def as_job(self, body: LineBody) -> dict[str, Any]:
        """Return the request of the contract, whose `model` and `on_disconnect` the run sets. Raises `ApiError`."""

    @abstractmethod
    def answer(self, body: LineBody, job_id: str, result: bytes) -> bytes:
        """Return the answer as JSON, for the result as a worker wrote it."""

    def error(self, error: SluiceError | ApiError, job_id: str) -> tuple[int, Mapping[str, Any]]:
        """Return the status and the body of an error."""
        if isinstance(error, ApiError):
            return error.form.status, openai_body(error)
        reply = error_reply(error)
        return reply.status, reply.body


class _Chat(Endpoint):
    url = "/v1/chat/completions"
    prompt = ("tools", "messages")

    def as_job(self, body: LineBody) -> dict[str, Any]:
        # Translations are imported when lines need them: every command, and an idle supervisor, has this module.
        from sluice.interfaces import committed
        from sluice.interfaces.tools import read_chat_tools

        read, _ = committed.chat(dict(body))
        job, _ = read_chat_tools(read)
        return job

    def answer(self, body: LineBody, job_id: str, result: bytes) -> bytes:
        from sluice.interfaces import committed
        from sluice.interfaces.tools import read_chat_tools, with_custom_calls

        read, ignored = committed.chat(dict(body))
        _, tools = read_chat_tools(read)
        if not ignored and not tools.targets:
            return result
        return _written(committed.told(with_custom_calls(json.loads(result), tools), ignored))


class _Embeddings(Endpoint):
    url = "/v1/embeddings"
    function = "embed"
    prompt = ("input",)

    def as_job(self, body: LineBody) -> dict[str, Any]:
        return in_base64(body)

    def answer(self, body: LineBody, job_id: str, result: bytes) -> bytes:
        return result if body.get("encoding_format") == "base64" else with_numbers(json.loads(result))


class _Responses(Endpoint):
    url = "/v1/responses"
    prompt = ("tools", "instructions", "input")

    def as_job(self, body: LineBody) -> dict[str, Any]:
        return dict(self._new(body, "").chat)

    def answer(self, body: LineBody, job_id: str, result: bytes) -> bytes:
        from sluice.interfaces.responses.stream import from_completion

        head = self._new(body, job_id).record.head
        completion = json.loads(result)
        return _written(from_completion(replace(head, created_at=completion["created"]), completion).response)

    def error(self, error: SluiceError | ApiError, job_id: str) -> tuple[int, Mapping[str, Any]]:
        from sluice.interfaces.responses.request import own_name

        status, told = super().error(error, job_id)
        return status, {"error": {**told["error"], "param": own_name(told["error"]["param"])}}

    def _new(self, body: LineBody, job_id: str) -> "NewResponse":
        from sluice.interfaces import committed
        from sluice.interfaces.responses.record import PREFIX, new_response
        from sluice.interfaces.responses.request import read_response_request

        read, ignored = committed.responses(dict(body))
        for name in ("background", "previous_response_id"):
            if read.get(name):
                raise refusal(name, "a line of a batch can neither have nor continue a stored response; leave it out.")
        request = replace(read_response_request(read), store=False, ignored=tuple(ignored))
        return new_response(request, f"{PREFIX}{job_id}", None)


class _Messages(Endpoint):
    url = MESSAGES
    prompt = ("tools", "system", "messages")

    def missing(self) -> str | None:
        if find_spec("pydantic"):
            return None
        return f"lines for {self.url} need pydantic; install mlx-sluice[cli]"

    def as_job(self, body: LineBody) -> dict[str, Any]:
        from sluice.interfaces.messages import committed
        from sluice.interfaces.messages.request import read_message

        read, _ = committed.messages(dict(body))
        _, job = read_message(read)
        return job

    def answer(self, body: LineBody, job_id: str, result: bytes) -> bytes:
        from sluice.interfaces.completion import events_of
        from sluice.interfaces.messages import committed
        from sluice.interfaces.messages.request import read_message
        from sluice.interfaces.messages.stream import MessageStream, whole_message

        read, ignored = committed.messages(dict(body))
        message, _ = read_message(read)
        stream = MessageStream(omit_thinking=message.omits_thinking, ignored=ignored)
        completion = {**json.loads(result), "id": _message_id(job_id)}
        return _written(whole_message(each for event in events_of(completion) for each in stream.events(event)))

    def error(self, error: SluiceError | ApiError, job_id: str) -> tuple[int, Mapping[str, Any]]:
        told = error if isinstance(error, ApiError) else from_client(error)
        return told.form.anthropic_status, anthropic_body(told, _message_id(job_id))


def _message_id(job_id: str) -> str:
    return f"msg_{job_id}"


def _written(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode()


CHAT = _Chat()
ENDPOINTS: Mapping[str, Endpoint] = {each.url: each for each in (CHAT, _Responses(), _Embeddings(), _Messages())}
