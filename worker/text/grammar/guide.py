"""Grammar state of a constrained answer, one for each row."""

import copy
import logging
import re
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import NoReturn

from llguidance import LLMatcher, LLTokenizer

from schemas import ChatRequest
from schemas.keys import Lane
from schemas.messages import Message
from worker.errors import JobFailure
from worker.schedule.request import GrammarError
from worker.text.grammar.attempt import Complaint, Unwanted, Written, question
from worker.text.grammar.builder import Grammars, OutputConstraint
from worker.text.grammar.compiler import Compiler
from worker.text.grammar.constraint import is_quick, markup_of, wish_of
from worker.text.grammar.errors import grammar_error
from worker.text.grammar.llg_tokenizer import NAME_BEGINS, without_added_tokens
from worker.text.grammar.reasoning import ReasoningMask, ReasoningState
from worker.text.grammar.sandbox import Uncompilable, error_of
from worker.text.output.formats import ModelFormat
from worker.text.output.harmony import ANSWER_BEGINS
from worker.text.prompt.normalize import normalize
from worker.text.prompt.prompt import Prompt
from worker.text.tokenizer import Tokenizer
from worker.text.vocabulary import Vocabulary

logger = logging.getLogger("sluice.text")

_SYSTEM = ("system", "developer")  # roles of messages that `normalize` puts in front


class GrammarStates:
    """Creates the grammar state of each constrained answer; a worker has one."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, dialect: ModelFormat, width: int) -> None:
        """`width`: tokens in the model's logits, which may exceed the tokenizer's vocabulary."""
        self._count = max(width, len(tokenizer.tokens))
        self._encode, self._ends, self._dialect = tokenizer.encode, tokenizer.eos_token_ids, dialect
        self._readable = readable(tokenizer, self._count)
        self._markup, self._compiler = markup_of(tokenizer, dialect), Compiler()
        self._grammars = Grammars(self._markup)
        self._reasoning = _reasoning(tokenizer, vocabulary, dialect, self._count)

    async def guide(self, request: ChatRequest, prompt: Prompt, lane: Lane = "interactive") -> "RowGrammar | None":
        """Return the grammar of a request, or None if the answer is unconstrained. Raises `JobFailure` if the
        constraint is not supported or cannot be satisfied."""
        wish = wish_of(request)
        if wish is None:
            return None
        if self._readable is None:
            raise JobFailure("unsupported", f"{wish.field}: this model's tokenizer does not support it; leave it out.")
        tenant = request.billed_to or ""
        run = partial(self._compiler.run, lane, tenant)
        begun = await run(self._begun, self._readable, request, prompt)
        thoughts = None if begun else self._thoughts(prompt)
        matcher = await self._matcher(self._readable, wish, thoughts is not None, lane, tenant)
        guide = await run(RowGrammar, matcher, self._ends, thoughts, begun)
        if guide.error:
            raise JobFailure(
                "invalid_request", f"{wish.field}: it does not allow the beginning of the answer in the last message."
            )
        return guide

    def _thoughts(self, prompt: Prompt) -> ReasoningState | None:
        if self._reasoning is None or prompt.thinking == "closed":
            return None
        return ReasoningState(self._reasoning, begun=prompt.thinking == "open")

    def _begun(self, vocabulary: LLTokenizer, request: ChatRequest, prompt: Prompt) -> list[int]:
        """Return the tokens of the answer, without reasoning, that the prompt already holds."""
        text, dialect = _last_words(request), self._dialect
        if dialect.think:
            text = text.rpartition(dialect.think[1])[2].lstrip()
        if prompt.thinking == "open" or not text.strip():
            return []
        header = self._encode(ANSWER_BEGINS) if dialect.harmony else []
        return [*header, *_as_text(vocabulary, text)]

    async def _matcher(
        self, vocabulary: LLTokenizer, wish: OutputConstraint, reasoned: bool, lane: Lane, tenant: str
    ) -> LLMatcher:
        quick, tried = is_quick(wish), partial(self._tried, wish, reasoned, lane, tenant)
        written = partial(self._grammars.of, wish, reasoned=reasoned)
        grammar = await (self._compiler.run(lane, tenant, written) if quick else tried())
        try:
            return await self._compiler.compiled(lane, tenant, vocabulary, grammar)
        except Uncompilable as error:
            if quick:
                await tried()  # raises an error that names the cause
            _refuse(wish.field, str(error))

    async def _tried(self, wish: OutputConstraint, reasoned: bool, lane: Lane, tenant: str) -> str:
        """Return a grammar that a child process has compiled, so compiling it here is safe. Raises `JobFailure`."""
        asked = await self._compiler.run(lane, tenant, partial(question, self._markup, wish, reasoned=reasoned))
        match await self._compiler.verdict(lane, tenant, asked):
            case Written(grammar):
                return grammar
            case Unwanted(type, message):
                raise JobFailure(type, message)
            case Complaint(said, place):
                _refuse(place or wish.field, said)


def _refuse(place: str, wrong: str) -> NoReturn:
    raise JobFailure("invalid_request", f"{place}: this schema cannot be enforced: {grammar_error(wrong)}")


def _as_text(vocabulary: LLTokenizer, text: str) -> list[int]:
    """Tokenize as plain text. Cuts the text before each `NAME_BEGINS`, since llguidance (1.9) would read a control
    token's name despite `parse_special=False`."""
    parts = re.split(f"({NAME_BEGINS})", text)
    return [token for part in parts for token in vocabulary.tokenize_str(part, parse_special=False)]


def _last_words(request: ChatRequest) -> str:
    """Return the text of the trailing assistant messages, which the answer continues; empty if there are none.

    Raises `JobFailure` for a text in several parts.
    """
    told = [message for message in request.messages if message.role not in _SYSTEM]
    last = list(takewhile(_is_spoken, reversed(told)))[::-1]
    if not last:
        return ""
    (said,) = normalize(last)
    content = said["content"]
    if isinstance(content, str):
        return content
    if len(content) > 1:
        raise JobFailure(
            "unsupported",
            "response_format: an assistant message in several parts cannot be continued; send one string.",
        )
    return "".join(part["text"] for part in content)


def _is_spoken(message: Message) -> bool:
    return message.role == "assistant" and not message.tool_calls


def readable(tokenizer: Tokenizer, count: int) -> LLTokenizer | None:
    """Return the tokenizer in llguidance's form, or None if it does not support it. Blocks all threads for about a
    second with a large vocabulary, so it is called before the first job. `count`: number of logits."""
    if tokenizer.definition is None:
        return None
    try:
        return LLTokenizer(
            without_added_tokens(tokenizer.definition), n_vocab=count, eos_token=sorted(tokenizer.eos_token_ids)
        )
    except ValueError as error:
        logger.info(
            "llguidance does not support this tokenizer, so response_format and forced tool calls are refused: %s",
            error,
        )
        return None


def _reasoning(tokenizer: Tokenizer, vocabulary: Vocabulary, dialect: ModelFormat, count: int) -> ReasoningMask | None:
    """Return the reasoning mask, or None if the model does not reason or does so within the grammar."""
    if dialect.harmony or not dialect.think:
        return None
    begins, (_, ends), (call, _) = dialect.think_start[0], dialect.think, tokenizer.tool or ("", "")
    banned = tokenizer.eos_token_ids
    return ReasoningMask(vocabulary, count, begins=begins, ends=ends, call=call, banned=banned)


class RowGrammar:
    """Grammar state of one row. Used by the engine thread alone, except `error`: llguidance raises if two threads use a
    matcher at once."""

    def __init__(
        self,
        matcher: LLMatcher,
        ends: frozenset[int],
        thoughts: ReasoningState | None = None,
        begun: Sequence[int] = (),
    ) -> None:
        """`ends`: tokens that end a sequence. `begun`: tokens of the answer proper that the prompt holds."""
        self._matcher, self._ends, self._begun, self._first_thoughts = matcher, ends, begun, thoughts
        self._broken: GrammarError | None = None
        self._begin()

    @property
    def error(self) -> GrammarError | None:
        """The error after which the grammar constrains nothing any more, or None."""
        return self._broken

    def reset(self) -> None:
        """Return to the state before the first sampled token."""
        self._matcher.reset()
        self._begin()

    def _begin(self) -> None:
        self._thoughts = copy.copy(self._first_thoughts)
        for token in self._begun:
            self._consume(token)

    def accept(self, token: int) -> None:
        """Advance by a sampled token. Tokens that end the sequence are ignored."""
        if token in self._ends:  # a batch may compute one step more than a row needs
            return
        if self._thoughts and self._thoughts.take(token):
            self._thoughts = None if self._thoughts.over else self._thoughts
            return
        self._thoughts = None
        self._consume(token)

    def bitmask(self) -> bytes:
        """Return the mask of allowed next tokens: a bit per token, in little-endian 32-bit words."""
        thoughts = self._thoughts
        if thoughts and thoughts.begun:
            return thoughts.allowed()
        mask = self._matcher.compute_bitmask()
        self._look()
        return _with(mask, thoughts.begins) if thoughts else mask

    def _consume(self, token: int) -> None:
        if self._broken:
            return
        if not self._matcher.try_consume_tokens([token]) and not self._matcher.is_error():
            self._broken = GrammarError(f"token {token} was not allowed.", ours=True)
            self._matcher.consume_token(token)  # makes the matcher allow only the end from here on
        self._look()

    def _look(self) -> None:
        if self._broken is None and (why := error_of(self._matcher)):
            self._broken = GrammarError(grammar_error(why), ours=False)


def _with(mask: bytes, token: int) -> bytes:
    place = token // 8
    return mask[:place] + bytes([mask[place] | 1 << token % 8]) + mask[place + 1 :]
