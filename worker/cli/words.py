"""`sluice prompt` and `sluice parse`: what a model reads for a request, and what is read of its answer."""

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.errors import CliError, needs_worker
from sluice.cli.options import AsJson
from sluice.cli.terminal.inputs import read_request_file, read_text
from sluice.cli.terminal.output import print_json
from sluice.cli.terminal.view import say_that_it_reads
from sluice.contract.keys import MAX_REQUEST_BYTES

if TYPE_CHECKING:
    from schemas import ChatRequest
    from worker.engine.tokenizer import MLXTokenizer
    from worker.text.codec import TextCodec
    from worker.text.prompt.prompt import Prompt

ModelFolder = Annotated[
    str,
    typer.Option(
        "--model", metavar="FOLDER_OR_HUB_ID", envvar="SLUICE_MODEL", help="The model; no weights are loaded."
    ),
]
_EXAMPLE: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


def prompt(
    model: ModelFolder,
    file: Annotated[
        str, typer.Option(metavar="PATH", help="A request as JSON: the body of a chat completion. `-` reads stdin.")
    ] = "-",
    as_json: AsJson = False,
) -> None:
    """Print the prompt that a request becomes, as the model reads it.

    The text goes to stdout; what was changed for the model's chat template, and why, to stderr, and from where the next
    turn, after an answer and another question, has to be computed again because its prompt differs there. With --json:
    the text, the tokens, the changes, the next turn's place (`next_turn`; null if nothing is computed again), and if
    the answer begins within reasoning. Images are not supported here.

    \b
    Examples:
      sluice prompt --model models/tiny-chat --file request.json
      sluice prompt --model mlx-community/Qwen3-4B-4bit --file request.json --json | jq '.tokens | length'
    """
    request = _request(read_request_file(file, MAX_REQUEST_BYTES))
    parts = [part for message in request.messages if isinstance(message.content, list) for part in message.content]
    if any(part.type == "image_url" for part in parts):
        raise CliError("messages: images are not supported here; leave out the image_url parts.")
    _, codec = _open(model)
    made = asyncio.run(_refusals(codec.prompt(request)))
    parts_at = asyncio.run(_refusals(codec.next_parting(request)))
    text = codec.text_of(made.tokens)
    if as_json:
        facts = {"text": text, "tokens": list(made.tokens), "thinking": made.thinking, "adapted": list(made.adapted)}
        next_turn = {"computed_from": parts_at.token, "why": parts_at.why} if parts_at else None
        print_json({**facts, "next_turn": next_turn})
        return
    print(text)
    for why in made.adapted:
        print(f"The chat template {why}.", file=sys.stderr)
    if parts_at:
        where = f"from token {parts_at.token:,} of {len(made.tokens):,}"
        print(f"The next turn will be computed again {where}: the chat template {parts_at.why}.", file=sys.stderr)


def parse(
    model: ModelFolder,
    file: Annotated[str, typer.Option(metavar="PATH", help="The answer as the model wrote it. `-` reads stdin.")] = "-",
    request: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The request that it answers, as JSON, for its tools and stop strings."),
    ] = None,
) -> None:
    """Print what is read of an answer: content, reasoning and calls.

    It is JSON, with what was put right in the calls. Without a request, calls of any function are read, and the
    answer is taken not to begin within reasoning.

    \b
    Examples:
      sluice parse --model models/tiny-chat --file answer.txt
      sluice parse --model models/tiny-chat --file answer.txt --request request.json | jq .tool_calls
    """
    answer = read_text(file, MAX_REQUEST_BYTES)
    asked = _request(read_request_file(request, MAX_REQUEST_BYTES) if request else {**_EXAMPLE, "tools": [_ANY_TOOL]})
    tokenizer, codec = _open(model)
    # Without a request no template renders anything: it may refuse the tool that stands for any.
    made = asyncio.run(_refusals(codec.prompt(asked))) if request else _empty_prompt()
    output = codec.output(asked, made, "parse")
    deltas = [output.feed(token) for token in tokenizer.encode(answer)]
    print_json({"dialect": codec.dialect, **_read([*deltas, output.flush()], output)})


def _empty_prompt() -> "Prompt":
    from worker.text.prompt.prompt import Prompt

    return Prompt((), "none")


_ANY_TOOL = {"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}}


def _read(deltas: list[Any], output: Any) -> dict[str, Any]:
    from worker.text.output.events import message_tool_calls
    from worker.text.output.output import concat

    whole = concat(deltas)
    return {
        "content": whole.content,
        "reasoning": whole.reasoning,
        "tool_calls": message_tool_calls(whole.tool_calls),
        "finish_reason": output.finish_reason("stop"),
        "repaired": output.repaired,
    }


def _open(model: str) -> "tuple[MLXTokenizer, TextCodec]":
    say_that_it_reads(model)
    with needs_worker():
        from worker.engine.model.check import open_tokenizer
        from worker.errors import CannotStart
        from worker.text.codec import TextCodec
    try:
        tokenizer = open_tokenizer(model)
    except CannotStart as error:
        raise CliError(str(error)) from None
    return tokenizer, TextCodec(tokenizer, len(tokenizer.tokens))


def _request(body: dict[str, Any]) -> "ChatRequest":
    with needs_worker():
        from worker.chat.request import read_request as validated
        from worker.errors import JobFailure
    try:
        return validated({**body, "model": None}, "", max_parts=1_000, has_draft_model=True)
    except JobFailure as refusal:
        raise CliError(refusal.message) from None


async def _refusals(rendering: Any) -> Any:
    from worker.errors import JobFailure

    try:
        return await rendering
    except JobFailure as refusal:
        raise CliError(refusal.message) from None
