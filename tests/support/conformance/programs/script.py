"""Scripts of answers: what the model of `player` answers is written in the user's message.

A message asks with `SCRIPT` and a JSON list of steps. Step k is the model's answer number k after that message, so that
a script has the call of a tool and what is said about its result; the last step is repeated.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

MODEL = "my-model"  # its name on the pages of docs/clients
MARK = "SCRIPT "
_OTHERS = "Notes."  # what is answered to a message without a script, as those that ask for a title or a summary
_WEATHER = ("get_weather", {"location": "Oslo"})  # the call that suites without a script expect
_RESULT_LETTERS = 400  # of a result of a tool that an answer repeats
_BEGIN, _END = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Step:
    """One answer. `say` may have `{results}`: the results of the tools since the answer before. An argument of `calls`
    that is a string is written as it is, as the arguments of a call that is broken."""

    say: str = ""
    think: str = ""
    calls: tuple[tuple[str, dict[str, Any] | str], ...] = ()
    silent_s: float = 0.0  # before the first token
    token_s: float = 0.0  # between two tokens
    repeat: int = 1  # times that `say` is said, each with its number


def message(*steps: Step) -> str:
    """Return a user's message that asks for these answers."""
    return f"Follow the script. {MARK}" + json.dumps([_given(step) for step in steps])


def _given(step: Step) -> dict[str, Any]:
    return {name: value for name, value in asdict(step).items() if value != getattr(Step(), name)}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model answers to a prompt. `step` is None if the last message had no script."""

    text: str
    step: Step | None = None
    number: int = 0  # of the step, from 0
    turn: int = 0  # number of the user's messages with a script, this one included


def answer_to(prompt: str) -> Answer:
    """Return the answer to the text of a prompt."""
    turns = _turns(prompt)
    asked = [at for at, (role, text) in enumerate(turns) if role == "user" and MARK in text]
    said = [at for at, (role, text) in enumerate(turns) if role == "user" and not _is_result(text)]
    if not asked or asked[-1] != said[-1]:
        if asked and (rest := _rest(turns[asked[-1] : said[-1] + 1])):
            return Answer(rest[0], rest[1], 0, len(asked))
        return Answer(_call(*_WEATHER) if _asks_weather(turns) else _OTHERS)
    steps = _steps(turns[asked[-1]][1])
    number = sum(role == "assistant" and bool(text) for role, text in turns[asked[-1] :])
    step = steps[min(number, len(steps) - 1)]
    results = [_result(text) for role, text in turns[asked[-1] :] if role == "user" and _is_result(text)]
    return Answer(_written(step, results), step, number, len(asked))


def _rest(turns: Sequence[tuple[str, str]]) -> tuple[str, Step] | None:
    """Return what is missing of a script's first answer that broke off, if the last message repeats what came of it, as
    Qwen Code's does to have the rest."""
    came = "".join(text for role, text in turns[1:] if role == "assistant")
    step = _steps(turns[0][1])[0]
    whole = _written(step, ())
    if not came or came not in turns[-1][1] or not whole.startswith(came):
        return None
    return whole[len(came) :], step


def _asks_weather(turns: Sequence[tuple[str, str]]) -> bool:
    """Return True if the last message asks for the weather, and there is a tool for it."""
    *before, last, _ = [("", ""), *turns]  # the last turn is the beginning of the answer
    return "weather" in last[1] and not _is_result(last[1]) and any(_WEATHER[0] in text for _, text in before)


def _turns(prompt: str) -> list[tuple[str, str]]:
    pieces = (piece.partition("\n") for piece in prompt.split(_BEGIN)[1:])
    return [(role, text.rsplit(_END, 1)[0].strip()) for role, _, text in pieces]


def _steps(text: str) -> list[Step]:
    """Return the steps of the message's last script."""
    written = text[text.rindex(MARK) + len(MARK) :]
    if written.startswith('[{\\"'):  # opencode quotes the message as a shell does
        written = written.replace('\\"', '"').replace("\\\\", "\\")
    try:
        given, _ = json.JSONDecoder().raw_decode(written)
    except ValueError as error:
        return [Step(say=f"The script cannot be read: {error}: {written[:_RESULT_LETTERS]}")]
    return [Step(**{**step, "calls": tuple((name, args) for name, args in step.get("calls", ()))}) for step in given]


def _is_result(text: str) -> bool:
    return text.startswith("<tool_response>")


def _result(text: str) -> str:
    return text.removeprefix("<tool_response>").removesuffix("</tool_response>").strip()[-_RESULT_LETTERS:]


def _written(step: Step, results: Sequence[str]) -> str:
    """Return the answer as Qwen's models write it."""
    thought = f"<think>\n{step.think}\n</think>\n\n" if step.think else ""
    said = step.say.replace("{results}", " | ".join(results))
    if step.repeat > 1:
        said = " ".join(f"{said} {k}" for k in range(step.repeat))
    return thought + said + "".join(_call(name, args) for name, args in step.calls)


def _call(name: str, args: dict[str, Any] | str) -> str:
    written = args if isinstance(args, str) else json.dumps(args)
    return f'\n<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {written}}}\n</tool_call>'
