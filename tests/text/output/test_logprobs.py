"""OpenAI's form of a token's logprobs."""

import json
import math

from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob

from worker.outcomes import Logprobs
from worker.text.codec import entry

SPELLED = {1: b" yes", 2: "é".encode(), 3: "👍".encode()[:2], 4: b""}


def test_an_entry_holds_the_token_and_its_alternatives_best_first() -> None:
    assert entry(1, Logprobs(-0.5, ((1, -0.5), (2, -1.25))), SPELLED.__getitem__) == {
        "token": " yes",
        "logprob": -0.5,
        "bytes": [32, 121, 101, 115],
        "top_logprobs": [
            {"token": " yes", "logprob": -0.5, "bytes": [32, 121, 101, 115]},
            {"token": "é", "logprob": -1.25, "bytes": [195, 169]},
        ],
    }


def test_a_piece_of_a_character_keeps_its_bytes() -> None:
    found = entry(3, Logprobs(-2.0), SPELLED.__getitem__)
    assert found == {"token": "\ufffd", "logprob": -2.0, "bytes": [240, 159], "top_logprobs": []}


def test_what_cannot_be_is_a_number_that_json_has() -> None:
    found = entry(4, Logprobs(-math.inf, ((1, -1e6),)), SPELLED.__getitem__)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["logprob"], found["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


def test_openai_s_own_type_reads_an_entry() -> None:
    for token in SPELLED:
        found = entry(token, Logprobs(-0.5, ((2, -0.75), (3, -3.0))), SPELLED.__getitem__)
        assert ChatCompletionTokenLogprob.model_validate(found, strict=True).model_dump() == found
