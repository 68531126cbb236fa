import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text import speech
from tests.text.speech import (
    ANSWERS,
    ENGINES,
    PLACES,
    REQUESTS,
    THINKING,
    TOOLS,
    Heard,
    Model,
    cut,
    hear,
    output,
    request,
)
from worker.chat.resume import Delivered, Restart, Resume, Start, delivered, replay, resume_plan
from worker.queue.job.resume_state import ResumeState, SpecPrefillReport
from worker.text.output.output import Output, OutputDelta, concat

TINY = speech.model()
HARMONY = next(each for each, _ in speech.SPEAKERS if each.dialect.harmony)
VOCAB = len(TINY.words.tokens)
BEGUN = {"fingerprint": "fp", "seed": 7}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


def log(*events: dict[str, Any]) -> list[bytes]:
    return [json.dumps({"seq": seq, **event}).encode() for seq, event in enumerate(events)]


def delta(tokens: list[int], said: OutputDelta, **more: Any) -> dict[str, Any]:
    texts = {name: text for name, text in (("content", said.content), ("reasoning", said.reasoning)) if text}
    calls = {"tool_calls": list(said.tool_calls)} if said.tool_calls else {}
    return {"type": "delta", "token_ids": tokens, **texts, **calls, **more}


def spoken(answer: Output, tokens: list[int], engine: Any = None) -> list[bytes]:
    """Return the log of a first attempt, an event for each token. With the engine's reason, the answer has ended."""
    events = [{"type": "started", **BEGUN}]
    for token in tokens:
        events.append(delta([token], answer.feed(token)))
        if answer.stopped:
            break
    if engine and not answer.stopped:
        events.append(delta([], answer.flush(engine)))
    return log(*events)


@given(ANSWERS, PLACES, THINKING, ENGINES, REQUESTS, st.integers(0, 60))
def test_what_a_new_attempt_says_after_what_was_delivered_is_the_unbroken_answer(
    answer: tuple[Model, str], places: list[int], thinking: str, engine: str, fields: dict[str, Any], at: int
) -> None:
    speaker, text = answer
    tokens = cut(speaker, text, places)
    unbroken = hear(output(speaker, thinking, **fields), tokens, engine)
    first = output(speaker, thinking, **fields)
    earlier = delivered(spoken(first, tokens[:at]))
    assert earlier is not None
    replayed = replay(earlier, lambda: output(speaker, thinking, **fields))
    assert replayed is not None
    second, ended = replayed
    assert (ended, second.stop_sequence) == (first.stopped, first.stop_sequence)
    rest = hear(second, () if second.stopped else tokens[at:], engine)
    assert Heard(concat([earlier.output, rest.said]), rest.finish_reason, rest.repaired) == unbroken


@given(ANSWERS, PLACES, THINKING, ENGINES, REQUESTS)
def test_an_answer_whose_last_words_were_let_out_has_ended(
    answer: tuple[Model, str], places: list[int], thinking: str, engine: str, fields: dict[str, Any]
) -> None:
    speaker, text = answer
    first, unended = (output(speaker, thinking, **fields) for _ in range(2))
    tokens = cut(speaker, text, places)
    earlier, before = delivered(spoken(first, tokens, engine)), delivered(spoken(unended, tokens))
    assert earlier is not None
    assert before is not None
    replayed = replay(earlier, lambda: output(speaker, thinking, **fields))
    assert replayed is not None
    second, ended = replayed
    assert ended == (unended.stopped or earlier.output != before.output)
    if ended:
        assert second.finish_reason(engine) == first.finish_reason(engine)


def test_an_answer_that_either_ending_explains_ended_with_its_call() -> None:
    tokens = cut(HARMONY, '<|channel|>commentary to=functions.weather json<|message|>{"city": ', [])
    first = output(HARMONY, "open", tools=TOOLS)
    earlier = delivered(spoken(first, tokens, "stop"))
    assert earlier is not None
    replayed = replay(earlier, lambda: output(HARMONY, "open", tools=TOOLS))
    assert replayed is not None
    assert replayed[0].finish_reason("stop") == first.finish_reason("stop") == "tool_calls"
    assert replayed[0].finish_reason("length") == "length"


@pytest.mark.parametrize(
    "said",
    [
        OutputDelta("Hello"),
        OutputDelta("Hullo", "Hm."),
        OutputDelta("Hello", "Hm"),
        OutputDelta(
            "Hello",
            "Hm.",
            ({"index": 0, "id": "x", "type": "function", "function": {"name": "now", "arguments": "{}"}},),
        ),
    ],
)
def test_an_answer_that_another_worker_told_in_other_words_differs(said: OutputDelta) -> None:
    tokens = tuple(TINY.words.encode("<think>Hm.</think>Hello"))
    assert replay(Delivered("fp", 7, tokens, OutputDelta("Hello", "Hm.")), lambda: output(TINY)) is not None
    assert replay(Delivered("fp", 7, tokens, said), lambda: output(TINY)) is None


def test_calls_of_another_id_differ() -> None:
    another = Output(TINY.vocabulary, TINY.dialect, request(tools=TOOLS), "none", "job-2")
    earlier = delivered(spoken(another, TINY.words.encode(CALL)))
    assert earlier is not None
    assert replay(earlier, lambda: output(TINY, tools=TOOLS)) is None


def test_what_was_delivered_is_gathered_since_an_attempt_last_started_over() -> None:
    first = {"index": 0, "id": "x", "type": "function", "function": {"name": "now", "arguments": "{"}}
    rest = {"index": 0, "function": {"arguments": "}"}}
    events = log(
        {"type": "started", "fingerprint": "old", "seed": 1},
        delta([1], OutputDelta("gone")),
        {"type": "restarted", **BEGUN},
        {"type": "progress", "phase": "prefill", "done": 1, "total": 2},
        delta([2, 3], OutputDelta("a", "b"), logprobs=[{"token": "a"}]),
        delta([4], OutputDelta(tool_calls=(first,)), logprobs=[{"token": "b"}, {"token": "c"}]),
        {"type": "resumed", **BEGUN},
        delta([], OutputDelta(tool_calls=(rest,))),
        delta([5], OutputDelta("c")),
    )
    call = {"index": 0, "id": "x", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    logprobs = (b'{"token":"a"}', b'{"token":"b"}', b'{"token":"c"}')
    assert delivered(events) == Delivered("fp", 7, (2, 3, 4, 5), OutputDelta("ac", "b", (call,)), logprobs)


def test_a_log_without_an_attempt_delivers_nothing() -> None:
    assert delivered([]) is None


class Gone(Exception):
    pass


def test_a_long_replay_stops_when_its_job_has_gone() -> None:
    checks = iter(range(50))

    def check() -> None:
        if next(checks, None) is None:
            raise Gone

    said = TINY.words.encode("word " * 100)
    with pytest.raises(Gone):
        replay(Delivered("fp", 7, tuple(said), OutputDelta("else")), lambda: output(TINY), check)


# The plan of a new attempt

HELLO = TINY.words.encode("Hello")
PROMPT = 9  # tokens
OURS = ResumeState.model_validate(BEGUN)


def plan(
    events: list[bytes], left: ResumeState | None = OURS, *, prompt: int = PROMPT, **state: Any
) -> Start | Resume | Restart:
    new = OURS.model_copy(update=state)
    return resume_plan(events, left, new, lambda: output(TINY), prompt_tokens=prompt, vocab_size=VOCAB)


def hello() -> list[bytes]:
    return spoken(output(TINY), HELLO)


def kept(*ranges: tuple[int, int], fingerprint: str = "fp") -> ResumeState:
    return OURS.model_copy(update={"specprefill": SpecPrefillReport(kept=ranges, fingerprint=fingerprint)})


def test_an_attempt_starts_if_none_has_begun_whatever_state_is_left() -> None:
    progress = log({"type": "progress", "phase": "prefill", "done": 1, "total": 2})
    for events in ([], progress):
        for left in (OURS, ResumeState(images="x"), kept((0, 5)), None):
            assert plan(events, left) == Start()


def test_an_attempt_resumes_after_the_delivered_tokens() -> None:
    resumed = plan(hello())
    assert isinstance(resumed, Resume)
    assert (resumed.delivered, resumed.state) == (delivered(hello()), OURS)
    assert not resumed.ended


def test_a_complete_answer_is_resumed_as_ended() -> None:
    events = spoken(output(TINY, stop="lo"), HELLO)
    resumed = resume_plan(events, OURS, OURS, lambda: output(TINY, stop="lo"), prompt_tokens=PROMPT, vocab_size=VOCAB)
    assert isinstance(resumed, Resume)
    assert resumed.ended


@pytest.mark.parametrize("state", [{"fingerprint": "other"}, {"seed": 8}, {"images": "digest"}])
def test_an_attempt_with_another_model_seed_or_image_restarts(state: dict[str, Any]) -> None:
    assert isinstance(plan(hello(), **state), Restart)


def test_an_attempt_with_the_same_images_resumes() -> None:
    left = OURS.model_copy(update={"images": "digest"})
    resumed = plan(hello(), left, images="digest")
    assert isinstance(resumed, Resume)
    assert resumed.state == left
    assert isinstance(plan(hello(), left), Restart), "the request has no images any more"


def test_an_attempt_whose_state_cannot_be_read_restarts() -> None:
    assert isinstance(plan(hello(), None), Restart)


def test_the_decision_which_tokens_are_dropped_stays() -> None:
    left = kept((0, 3), (7, PROMPT))
    resumed = plan(hello(), left)
    assert isinstance(resumed, Resume)
    assert (resumed.state, resumed.state.kept_ranges) == (left, ((0, 3), (7, PROMPT)))


def test_the_decision_to_drop_none_stays() -> None:
    left = OURS.model_copy(update={"specprefill": SpecPrefillReport(kept=None, why_whole="Short.", fingerprint="fp")})
    resumed = plan(hello(), left)
    assert isinstance(resumed, Resume)
    assert (resumed.state, resumed.state.kept_ranges) == (left, None)


@pytest.mark.parametrize(
    "left",
    [
        kept((0, 5)),  # of a shorter prompt
        kept((0, 3), (7, PROMPT), fingerprint="other"),
        kept((5, 3), (4, PROMPT)),
        kept((0, 5), (5, PROMPT)),  # not separate
        kept((-2, PROMPT)),
        kept(),
    ],
)
def test_an_attempt_that_does_not_know_which_tokens_were_dropped_restarts(left: ResumeState) -> None:
    assert isinstance(plan(hello(), left), Restart)


def test_delivered_tokens_that_yield_another_text_here_are_not_continued() -> None:
    other = log({"type": "started", **BEGUN}, delta(list(HELLO), OutputDelta("Hullo")))
    assert isinstance(plan(other), Restart)


def started_and(*events: Any) -> list[bytes]:
    return log({"type": "started", **BEGUN}, *events)


FOREIGN: dict[str, list[bytes]] = {
    "no JSON": [b"garbage"],
    "nested too deep": [b"[" * 100_000],
    "a list": [b"[]"],
    "a string": [b'"a"'],
    "a seed that is a string": log({"type": "started", "fingerprint": "fp", "seed": "7"}),
    "no fingerprint": log({"type": "started", "seed": 7}),
    "no tokens": started_and({"type": "delta"}),
    **{
        f"the token {token!r}": started_and({"type": "delta", "token_ids": [token]})
        for token in (-1, -(2**31), 2**70, VOCAB, "a", 1.5, None, [1], True)
    },
    "reasoning that is a number": started_and({"type": "delta", "token_ids": [], "reasoning": 1}),
    "content that is a list": started_and({"type": "delta", "token_ids": [], "content": ["a"]}),
    "a call without a function": started_and({"type": "delta", "token_ids": [], "tool_calls": [{"index": 0}]}),
    "logprobs that are numbers": started_and({"type": "delta", "token_ids": [], "logprobs": [1]}),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_log_that_no_worker_wrote_is_started_over(name: str) -> None:
    assert isinstance(plan(FOREIGN[name]), Restart)
