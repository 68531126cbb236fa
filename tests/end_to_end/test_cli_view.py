"""The command's output for a job. The test writes its events; there is no worker."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_cli import Command, Terminal

_CANCELLED = {"type": "cancelled", "reason": "requested", "usage": {}}
_TIMINGS = {"queue_s": 0.0, "prefill_s": 0.1, "ttft_s": 0.1, "decode_s": 0.4, "tokens_per_s": 10.0}
_FINISHED = {"type": "finished", "finish_reason": "stop", "usage": {"completion_tokens": 5}, "timings": _TIMINGS}
_FAILED = {"type": "failed", "error": {"type": "internal", "message": "ours", "retryable": True}, "usage": {}}
_THOUGHT: list[dict[str, Any]] = [{"type": "delta", "reasoning": "Hm.\n"}]
_DIM = "\x1b[2;3m"


@pytest.mark.parametrize(("last", "code"), [(_FAILED, 1), (_CANCELLED, 3)])
def test_tail_exits_as_the_job_ended(sluice: Command, last: dict[str, Any], code: int) -> None:
    sluice.write_log("b-3", {"type": "started"}, last)
    assert sluice("tail", "b-3")[0] == code


def test_text_cannot_steer_the_terminal(sluice: Command) -> None:
    sluice.write_log("b-4", {"type": "delta", "content": "a\x1b[2Jb\ud800\n\tc"}, {**_CANCELLED, "reason": "\x07"})
    assert sluice("tail", "b-4") == (3, "a\ufffd[2Jb\ufffd\n\tc\n", "cancelled: \ufffd\n")


def test_a_rate_that_was_not_measured_is_not_shown(sluice: Command) -> None:
    few = {**_FINISHED, "timings": {**_TIMINGS, "tokens_per_s": 0.0}}
    sluice.write_log("b-7", {"type": "started"}, {"type": "delta", "content": "1 2 3"}, few)
    err = sluice("tail", "b-7")[2]
    assert "5 tokens" in err
    assert "tokens/s" not in err


def calling(name: str, *arguments: str, index: int = 0) -> list[dict[str, Any]]:
    """Return the deltas of a tool call: its name, then fragments of its arguments."""
    call = {"index": index, "id": "c", "type": "function", "function": {"name": name, "arguments": ""}}
    parts = [{"index": index, "function": {"arguments": part}} for part in arguments]
    return [{"type": "delta", "tool_calls": [said]} for said in (call, *parts)]


def test_thoughts_tool_calls_and_a_second_start_each_get_their_line(sluice: Command) -> None:
    sluice.write_log(
        "b-5",
        {"type": "started"},
        {"type": "delta", "content": "Let"},
        {"type": "restarted"},
        {"type": "delta", "reasoning": "Hm."},
        {"type": "delta", "content": "Let me see:"},
        *calling("weather", '{"city": ', '"Oslo"}'),
        {"type": "resumed"},
        *calling("time", "{}", index=1),
        _FINISHED,
    )
    code, out, err = sluice("tail", "b-5")
    assert (code, out) == (0, 'Let\nLet me see:\n→ weather({"city": "Oslo"})\n→ time({})\n')
    assert err.startswith(
        "worker w, model m, seed 1\nw starts over: ignore the text so far\nHm.\nw continues\nqueue 0 ms"
    )


@pytest.mark.parametrize("next", [{"type": "restarted"}, {"type": "delta", "reasoning": "Oh."}, _FINISHED, _CANCELLED])
def test_tool_call_that_was_cut_off_is_not_shown(sluice: Command, next: dict[str, Any]) -> None:
    sluice.write_log("b-6", {"type": "started"}, *calling("weather", '{"ci'), next, _FINISHED)
    assert sluice("tail", "b-6")[1] == ""


@pytest.mark.parametrize(
    ("said", "reason", "why"),
    [
        (calling("weather", "{}"), "tool_calls", "the model needs the result of a tool call first"),
        (_THOUGHT, "stop", "the model wrote reasoning only"),
        (_THOUGHT, "length", "the token limit was reached first; increase max_tokens"),
        (calling("weather", '{"ci'), "length", "the token limit was reached first; increase max_tokens"),
        ([], "stop", "the answer is empty"),
    ],
)
def test_answer_without_text_says_why(sluice: Command, said: list[dict[str, Any]], reason: str, why: str) -> None:
    sluice.write_log("b-7", {"type": "started"}, *said, {**_FINISHED, "finish_reason": reason})
    assert sluice("tail", "b-7")[2].splitlines()[-2] == f"no text: {why}"


def test_tail_that_shows_only_the_end_does_not_say_that_there_was_no_text(sluice: Command) -> None:
    sluice.write_log("b-8", {"type": "started"}, {"type": "delta", "content": "11"}, _FINISHED)
    assert "no text" not in sluice("tail", "b-8", "--after", "1")[2]


def test_only_the_text_of_an_answer_goes_back_to_the_model(sluice: Command, redis_url: str, tmp_path: Path) -> None:
    with closing(Terminal(redis_url, tmp_path, "chat", "--model", "nobody")) as talk:
        talk.until("> ")
        talk.type("Think.\r")
        first = sluice.wait_for_request("nobody", "Think.")
        sluice.write_log(first, {"type": "started"}, *_THOUGHT, {"type": "delta", "content": "11"}, _FINISHED)
        shown = talk.until("\n> ")  # on a busy machine a note that no worker is running stands between the two
        assert f"{_DIM}Hm.\x1b[0m\r\n" in shown
        assert "\n11\r\n" in shown
        talk.type("And?\r")
        second = sluice.wait_for_request("nobody", "And?")
    assert [(message["role"], message["content"]) for message in sluice.messages(second)] == [
        ("user", "Think."),
        ("assistant", "11"),
        ("user", "And?"),
    ]
