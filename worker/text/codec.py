"""Converts between messages and tokens for one model: prompts, grammars, output and logprobs."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from schemas import ChatRequest
from sluice.contract.keys import Lane
from worker.errors import JobFailure
from worker.outcomes import Logprobs
from worker.request import GrammarState
from worker.text.dialects.cursor import Cursor
from worker.text.dialects.values import Parameters
from worker.text.output.answer import AnswerReader
from worker.text.output.formats import ModelFormat
from worker.text.output.output import Output
from worker.text.output.thought import Thought, ThoughtFormat
from worker.text.prompt.boundaries import TokenOffsets, cache_boundaries, droppable_ranges
from worker.text.prompt.normalize import ControlTokenEscaping
from worker.text.prompt.parting import Parting, next_parting
from worker.text.prompt.prompt import Prompt, Prompts, template_trial
from worker.text.prompt.template_changes import write_as_json
from worker.text.threads import Check, TextThreads
from worker.text.tokenizer import Tokenizer, Vocabulary

if TYPE_CHECKING:
    from worker.text.grammar.guide import GrammarStates

logger = logging.getLogger("sluice.text")

T = TypeVar("T")


def entry(token: int, logprobs: Logprobs, bytes_of: Callable[[int], bytes]) -> dict[str, Any]:
    """Return one entry of a choice's `logprobs.content`.

    A token may be a part of a character: then `bytes` is exact, and `token` has replacement characters.
    """
    return {
        **_one(bytes_of(token), logprobs.token),
        "top_logprobs": [_one(bytes_of(other), logprob) for other, logprob in logprobs.top],
    }


def _one(spelled: bytes, logprob: float) -> dict[str, Any]:
    finite = max(logprob, -9999.0)  # OpenAI's value for an impossible token; JSON has no minus infinity
    return {"token": spelled.decode(errors="replace"), "logprob": finite, "bytes": list(spelled)}


class TextCodec:
    """Renders prompts and reads answers for one model; a worker has one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab: int,
        *,
        boundaries: bool = False,
        droppable: bool = False,
        control_tokens: bool = False,
        context: int | None = None,
        hold_calls: bool = False,
    ) -> None:
        """`vocab`: number of logits, which may exceed the tokenizer's vocabulary.
        `boundaries`: plan cache boundaries, for models whose cache cannot be cut at any token.
        `droppable`: plan the droppable ranges, for workers with a draft model.
        `control_tokens`: read control tokens in a client's text as tokens, not as text.
        `context`: its length in tokens; a prompt well beyond it is refused before it is tokenized.
        `hold_calls`: calls in free text satisfy the schemas of all functions; else of strict ones.
        """
        self._tokenizer, self._vocab = tokenizer, vocab
        self._vocabulary, self._threads = Vocabulary(tokenizer), TextThreads()
        self._boundaries, self._droppable = boundaries, droppable
        self._control_tokens, self._context = control_tokens, context
        self._hold_calls = hold_calls
        self._thought_formats = dict[tuple[bool, ...], ThoughtFormat | None]()  # by what they depend on in a request
        self._grammars: asyncio.Future[GrammarStates] | None = None  # begun at the first constrained answer

    @cached_property
    def _format(self) -> ModelFormat:
        """The output format, which renders short conversations to find out: `prepare` limits their time."""
        return ModelFormat.of(self._tokenizer)

    @cached_property
    def _prompts(self) -> Prompts:
        tokenizer, think = self._tokenizer, self._format.think
        places = TokenOffsets(self._vocabulary, len(tokenizer.tokens)) if self._boundaries or self._droppable else None
        return Prompts(
            tokenizer,
            think,
            partial(cache_boundaries, places) if places and self._boundaries else None,
            partial(droppable_ranges, places) if places and self._droppable else None,
            None if self._control_tokens else _escaping(tokenizer, self._format),
            context=self._context,
            threads=self._threads,
            write_calls=self._format.dialect.write if self._format.dialect else write_as_json,
        )

    @property
    def dialect(self) -> str | None:
        """The name of the dialect of the model's calls; None if it is not known."""
        if self._format.harmony:
            return "harmony"
        return self._format.dialect.name if self._format.dialect else None

    @property
    def parses_tools(self) -> bool:
        """True if the model's format of tool calls is known."""
        return self._format.reads_calls

    @property
    def parses_thoughts(self) -> bool:
        """True if the model has markers around its thoughts."""
        return self._format.harmony or self._format.think is not None

    async def prepare(self) -> None:
        """Do what would stall the streams of running jobs: try the chat template, and build a large vocabulary's tables
        for grammars. Raises `CannotStart` if the template takes too long."""
        async with template_trial():
            await self._threads.run("interactive", 0, lambda check: self._format)
        if not self.parses_tools:
            logger.info("No known form of tool calls was found in the model's chat template: its calls are not read.")
        await self._prompts.try_template()
        if self._vocab > 8_192:  # tables of large vocabularies take up to a second to build
            await self._grammar_states()

    async def next_parting(self, request: ChatRequest) -> Parting | None:
        """Return where the next turn's prompt parts from the request's own; None if it begins with all of its messages.
        Raises `JobFailure`."""
        return await next_parting(self.prompt, self.text_of, request, self._format.think)

    async def prompt(self, request: ChatRequest, images: Sequence[str] = (), lane: Lane = "interactive") -> Prompt:
        """Render and tokenize the request's messages.

        `images`: the text that the model reads for each image of the messages, in order. Raises `JobFailure`, which
        quotes the template's error.
        """
        return await self._prompts.render(request, images, lane)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, control tokens included."""
        return b"".join(map(self._vocabulary.bytes_of, tokens)).decode("utf-8", "replace")

    async def prediction(self, text: str, lane: Lane = "interactive", tenant: str = "") -> tuple[int, ...]:
        """Tokenize a text that an answer may copy, on a text thread."""
        return await self.run(lane, len(text), lambda check: tuple(self._tokenizer.encode(text)), tenant)

    async def grammar(
        self,
        request: ChatRequest,
        prompt: Prompt,
        lane: Lane = "interactive",
        *,
        drafts: bool = False,
        resumes: bool = False,
        warn: Callable[[str], None] = lambda line: None,
    ) -> GrammarState | None:
        """Return the grammar of the answer, or None if the answer is free. `drafts`: the row may take drafts.
        `resumes`: the answer goes on after an earlier attempt. `warn`: see `GrammarStates.create`.

        Raises `JobFailure` for a schema that cannot be enforced.
        """
        holds_calls = self.parses_tools and request.held_tools(every=self._hold_calls)
        if not (request.constrains_answer or holds_calls):
            return None
        return await (await self._grammar_states()).create(
            request, prompt, lane, drafts=drafts, resumes=resumes, warn=warn
        )

    def limited(
        self, request: ChatRequest, prompt: Prompt, grammar: GrammarState | None, *, loop_guard: bool
    ) -> GrammarState | None:
        """Return the grammar of the answer with the limits of its thoughts; as it is if there are none. `loop_guard`:
        thoughts that repeat themselves are closed.

        Raises `JobFailure` if the request limits thoughts that cannot be closed.
        """
        limit, begins_closed = request.reasoning_limit, prompt.thinking == "closed"
        # A thought after one that the prompt has closed is rare, and a loop in it ends the answer.
        if limit is None and (begins_closed or not loop_guard):
            return grammar
        new_thought = self._new_thought(request, prompt, loop_guard=loop_guard)
        if new_thought is None:
            return grammar
        if not new_thought().can_close:
            if limit is None:
                return grammar
            message = "max_reasoning_tokens: this model ends its reasoning as it ends its answer; leave it out."
            raise JobFailure("unsupported", message, param="max_reasoning_tokens")
        # Imported here: most of a worker's start is imports.
        from worker.text.grammar.row.thought import ThoughtLimit

        return ThoughtLimit(new_thought, grammar, max(self._vocab, len(self._tokenizer.tokens)))

    def _new_thought(self, request: ChatRequest, prompt: Prompt, *, loop_guard: bool) -> Callable[[], Thought] | None:
        """Return a function that returns the thoughts of an answer before its first token; None if the model has
        none."""
        traits = bool(request.offered_tools), request.forces_call, request.constrains_answer
        if traits not in self._thought_formats:
            self._thought_formats[traits] = self._format.thought_format(self._tokenizer, self._vocabulary, request)
        if (form := self._thought_formats[traits]) is None:
            return None
        return partial(
            Thought,
            form,
            begun=prompt.thinking == "open",
            only_first=prompt.thinking == "closed" or request.constrains_answer,
            budget=request.reasoning_limit,
            loops=loop_guard,
            new_reader=self._new_thought_reader(request),
        )

    def _new_thought_reader(self, request: ChatRequest) -> Callable[[Cursor], AnswerReader] | None:
        """Return a function that returns a reader of an answer from within a thought; None if no calls are read."""
        thoughts, dialect = self._format.thoughts, self._format.dialect
        if self._format.harmony or dialect is None or not request.offered_tools:
            return None
        functions = {tool.function.name: Parameters(tool.function.parameters) for tool in request.offered_tools}
        return lambda cursor: AnswerReader(
            cursor, thoughts, dialect, functions, reasons=True, thought=False, only_before_content=False
        )

    async def _grammar_states(self) -> "GrammarStates":
        if self._grammars is None:
            self._grammars = asyncio.ensure_future(asyncio.to_thread(self._new_grammar_states))
        return await asyncio.shield(self._grammars)

    def _new_grammar_states(self) -> "GrammarStates":
        # llguidance and the rewriting of schemas take a while to import, and most first chats need neither.
        from worker.text.grammar.guide import GrammarStates

        return GrammarStates(self._tokenizer, self._vocabulary, self._format, self._vocab, hold_calls=self._hold_calls)

    async def run(self, lane: Lane, characters: int, work: Callable[[Check], T], tenant: str = "") -> T:
        """Call `work`, whose input has `characters` characters, on a text thread: see `Pool.run`."""
        return await self._threads.run(lane, characters, work, tenant)

    def output(self, request: ChatRequest, prompt: Prompt, job_id: str, *, loop_guard: bool = False) -> Output:
        """Return a new output parser for the job's answer. `loop_guard`: it ends an answer that repeats itself."""
        new_thought = self._new_thought(request, prompt, loop_guard=loop_guard)
        thought = new_thought() if new_thought else None
        return Output(
            self._vocabulary, self._format, request, prompt.thinking, job_id, thought=thought, loop_guard=loop_guard
        )

    def logprobs(self, token: int, sampled: Logprobs) -> dict[str, Any]:
        """Return the token's entry in OpenAI's form."""
        return entry(token, sampled, self._vocabulary.bytes_of)


def _escaping(tokenizer: Tokenizer, model_format: ModelFormat) -> ControlTokenEscaping:
    if model_format.harmony:  # its markers end turns
        return ControlTokenEscaping(tokenizer.control_tokens)
    dialect = model_format.dialect
    calls = (*dialect.openings, dialect.closing) if dialect else ()
    return ControlTokenEscaping(tokenizer.control_tokens, (*(model_format.think or ()), *calls))
