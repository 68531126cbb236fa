"""A job of an embedding model, without a model: its limits, and what it makes of vectors."""

import struct
from typing import Any

import pytest

from schemas import EmbeddingRequest
from tests.fakes import FakeEngine
from tests.queue.helpers import settings
from worker.embed import EmbeddingContext, _data, _read, _tokens, shortened
from worker.errors import JobFailure
from worker.monitoring.sink import MetricsSink
from worker.text.threads import never


def context(**given: Any) -> EmbeddingContext:
    engine: Any = FakeEngine(lambda request: b"")
    fixed = {
        "encode": lambda text: [5] * len(text), "fingerprint": "fp", "context_tokens": 200, "vocab_size": 1000,
        "dimensions": 64, "metrics": MetricsSink(),
    }  # fmt: skip
    return EmbeddingContext(settings(""), engine, **{**fixed, **given})


def asks(input: Any, **given: Any) -> EmbeddingRequest:
    return EmbeddingRequest.model_validate({"input": input, **given})


def refused(input: Any, **given: Any) -> JobFailure:
    with pytest.raises(JobFailure) as failed:
        _tokens(asks(input), context(**given), never)
    return failed.value


def test_the_tokens_of_all_inputs_together_are_limited() -> None:
    assert len(_tokens(asks(["a" * 150] * 2_000), context(), never)) == 2_000
    why = refused(["a" * 150] * 2_001)
    assert (why.type, why.param) == ("too_large", "input")
    assert "300,150 tokens together; at most 300,000" in why.message


def test_a_single_input_may_have_more_tokens_than_all_together_if_the_context_has() -> None:
    assert len(_tokens(asks("a" * 400_000), context(context_tokens=500_000), never)[0]) == 400_000


def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenized() -> None:
    why = refused(["a", "a" * 1_000_001], encode=lambda text: [1])
    assert (why.type, why.param) == ("too_large", "input[1]")


def test_a_text_without_tokens_is_refused() -> None:
    assert refused(" ", encode=lambda text: []).param == "input"


def test_another_model_is_refused_by_its_name() -> None:
    assert _read({"input": "a", "model": "default"}, context()).input == "a"
    with pytest.raises(JobFailure, match="this queue serves 'default', not 'other'"):
        _read({"input": "a", "model": "other"}, context())


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
def test_no_answer_has_more_bytes_than_were_counted(encoding: Any) -> None:
    worst = struct.pack("<4f", -1.1754943508222875e-38, -3.4028234663852886e38, -1.2345678806304932, -1e-45)
    request = asks(["a"] * 3, encoding_format=encoding)
    entries = _data(request, [worst] * 3, never)
    counted = 4 * (16 / 3 if encoding == "base64" else 24)
    assert all(len(entry) <= counted + len('{"object":"embedding","index":0,"embedding":[]}') + 3 for entry in entries)


def test_a_vector_is_shortened_to_the_length_1_and_one_of_zeros_stays() -> None:
    assert struct.unpack("<2f", shortened(struct.pack("<3f", 3, 4, 12), 2)) == pytest.approx((0.6, 0.8))
    assert shortened(bytes(12), 2) == bytes(8)
    assert shortened(b"abcd", 1) == b"abcd"
