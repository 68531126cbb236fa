"""The client's exceptions, as a task queue or a process pool hands them on."""

import copy
import json
import pickle
from collections.abc import Callable, Iterator

import pytest

from sluice import openai
from sluice.batch.lines import BadLine
from sluice.contract.events import JobError
from sluice.errors import JobCancelled, JobFailed, NoWorker, QueueFull, SluiceError, UnknownJob
from sluice.gateway.sse import ClientDisconnected
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError
from worker.errors import JobFailure
from worker.text.grammar.schema.unsupported import UnsupportedKeyword

REFUSED = JobError("too_large", "The prompt has 9 tokens.", False, "messages")
GIVEN: dict[type[Exception], Exception] = {
    JobFailed: JobFailed(REFUSED),
    JobCancelled: JobCancelled("requested"),
    QueueFull: QueueFull(12, 10, 2.5),
    NoWorker: NoWorker("defalt", ["other", "default"]),
    openai.BadRequest: openai.BadRequest("model: it must be a name.", "model"),
}


def classes(base: type[Exception]) -> Iterator[type[Exception]]:
    yield base
    for each in base.__subclasses__():
        yield from classes(each)


def through_json(error: Exception) -> Exception:
    """As Celery's result backend does with its default serializer."""
    return type(error)(*json.loads(json.dumps(error.args)))


def pickled(error: Exception) -> Exception:
    copied: Exception = pickle.loads(pickle.dumps(error))
    return copied


WAYS: list[Callable[[Exception], Exception]] = [pickled, copy.copy, copy.deepcopy, through_json]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", sorted(set(classes(SluiceError)), key=lambda kind: kind.__name__))
def test_every_exception_of_the_client_survives_being_handed_on(
    kind: type[Exception], way: Callable[[Exception], Exception]
) -> None:
    error = GIVEN.get(kind) or kind("a sentence")
    again = way(error)
    assert type(again) is kind
    assert (str(again), vars(again)) == (str(error), vars(error))


@pytest.mark.parametrize("way", WAYS)
def test_a_failure_that_was_handed_on_has_its_type_and_if_a_retry_may_succeed(
    way: Callable[[Exception], Exception],
) -> None:
    again = way(JobFailed(REFUSED))
    assert isinstance(again, JobFailed)
    assert again.error == REFUSED


@pytest.mark.parametrize("way", [pickled, copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    "error",
    [
        ApiError(ErrorForm.OVERLOADED, "Later.", retry_after_s=2.0),
        ClientDisconnected(),
        BadLine("missing", "There is no body.", "body"),
        JobFailure("overloaded", "Later.", retryable=True),
        UnsupportedKeyword("/a/b", "it must be an object"),
    ],
)
def test_other_exceptions_with_fields_survive_being_copied(
    error: Exception, way: Callable[[Exception], Exception]
) -> None:
    again = way(error)
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_a_sentence_stays_the_text_of_an_exception() -> None:
    assert str(UnknownJob("no trace")) == "no trace"
    assert str(JobFailed(REFUSED)) == "too_large: The prompt has 9 tokens."
