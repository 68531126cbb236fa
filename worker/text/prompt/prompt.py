"""Renders a request's messages with the model's own chat template, and tokenizes the text."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Literal

from jinja2 import TemplateError

from schemas import ChatRequest
from sluice.contract.keys import Lane
from worker.errors import CannotStart, JobFailure
from worker.text.prompt.boundaries import Codec, Rendered
from worker.text.prompt.normalize import ControlTokenEscaping, Inputs, normalize
from worker.text.prompt.size_limit import PromptLimit, cost_in_characters
from worker.text.prompt.template_changes import Adaptation, WriteCalls, write_as_json
from worker.text.prompt.template_compat import (
    Adapt,
    Finding,
    Flaw,
    NeedsAdaptation,
    TemplateAdapter,
    Think,
)
from worker.text.prompt.template_inputs import (
    TemplateFailed,
    TemplateInputs,
    TemplateTools,
    Variables,
    template_variables,
)
from worker.text.threads import LARGE, Check, TextThreads, never
from worker.text.tokenizer import TemplateMessages, Tokenizer

logger = logging.getLogger("sluice.text")

# Longer conversations take more than a millisecond, and are rendered on a thread: other streams share the event loop.
_LONG_CHARACTERS = 2_000
_TRIAL_S = 20.0  # for the first message of a worker, of one word; compiling the template is included
# Private-use characters, which texts hardly ever contain.
_FOR_IMAGES = range(0x100000, 0x10FFFE)
_NO_VISION = {"type": "text", "text": "[image: this model has no vision]"}


@asynccontextmanager
async def template_trial() -> AsyncIterator[None]:
    """Limit the time of what renders short conversations with an untried template. Raises `CannotStart`."""
    try:
        async with asyncio.timeout(_TRIAL_S):
            yield
    except TimeoutError:
        raise CannotStart(
            f"the model's chat template took longer than {_TRIAL_S:g} s for messages of one word; serve a copy of the "
            "model with another chat_template.jinja."
        ) from None


Thinking = Literal["open", "closed", "none"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt."""

    tokens: tuple[int, ...]
    thinking: Thinking  # the answer begins within a think block, after one that the prompt closed, or neither
    boundaries: tuple[int, ...] = ()  # token counts at which later prompts may diverge, the most valuable first
    droppable_ranges: tuple[tuple[int, int], ...] = ()  # ranges of tokens, end exclusive: see `SpecPrefillParams`
    adapted: tuple[str, ...] = field(default=(), compare=False)  # what was changed for the template, and why


class Prompts:
    """Renders prompts for one model; a worker has one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        think: Think,
        boundaries: Callable[[Rendered], tuple[int, ...]] | None = None,
        droppable: Callable[[Rendered], tuple[tuple[int, int], ...]] | None = None,
        escaping: ControlTokenEscaping | None = None,
        *,
        context: int | None = None,
        threads: TextThreads | None = None,
        write_calls: WriteCalls = write_as_json,
    ) -> None:
        """`think`: the markers around reasoning. `boundaries`, `droppable`: plan these parts of a prompt; None omits
        them. `escaping`: escapes control tokens in a request; without it they are read as tokens. `context`: its length
        in tokens; a prompt well beyond it is refused before it is tokenized. `write_calls`: writes calls as the model
        does, for a template that writes none.
        """
        self._tokenizer = tokenizer
        self._think = think
        self._boundaries = boundaries
        self._droppable = droppable
        self._limit = PromptLimit(tokenizer.encode, context, think)
        self._threads = threads or TextThreads()
        self._escaping, self._adapter = escaping, TemplateAdapter(think, write_calls)
        self._accepted = TemplateInputs(tokenizer.template)
        self._logged, self._is_quick = set[str](), False

    async def try_template(self) -> None:
        """Render a message of one word on a text thread, so that a template that takes too long ends the worker before
        its first job. Errors of the template are left to the requests. Raises `CannotStart`."""
        async with template_trial():
            with suppress(JobFailure):
                await self.render(ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hello"}]}))

    async def render(self, request: ChatRequest, images: Sequence[str] = (), lane: Lane = "interactive") -> Prompt:
        """Return the request's prompt. A short one is rendered on the event loop if the template was quick before, any
        other on a text thread.

        `images`: the text that the model reads for each image of the messages, in order; empty for a text model.
        Raises `JobFailure`, which quotes the template's error.
        """
        variables, unread = template_variables(request, self._tokenizer.template)
        without_effect = tuple(f"does not read {name}: it has no effect on requests that set it" for name in unread)
        for why in without_effect:
            self._log_once(why)
        prompt = await self._rendered(request, variables, images, lane)
        return replace(prompt, adapted=(*without_effect, *prompt.adapted)) if without_effect else prompt

    async def _rendered(self, request: ChatRequest, variables: Variables, images: Sequence[str], lane: Lane) -> Prompt:
        read = partial(_inputs, request, variables)
        length = cost_in_characters([request.messages, request.offered_tools, variables, images], LARGE)
        if self._is_quick and length < _LONG_CHARACTERS and not self._needs_escaping(inputs := read()):
            with suppress(NeedsAdaptation):  # several trials are needed then, which run on a thread
                return self._prompt(lambda: inputs, images, self._adapter.render_unchanged, never)
        work = partial(self._prompt, read, images, self._adapter.adapt)
        return await self._threads.run(lane, length, work, request.effective_tenant or "")

    def _prompt(self, read: Callable[[], Inputs], images: Sequence[str], adapt: Adapt, check: Check) -> Prompt:
        parts, tools, variables = read()
        flat, image_texts = _flattened(parts, images)
        counted = self._limit.check_contents(flat, check)
        inputs, codec = self._escaped(Inputs(flat, tools, variables))
        conversation = inputs.conversation
        render = partial(self._tokenizer.render, images=image_texts)
        rendering = _Rendering(render, adapt, self._accepted, inputs.tools, inputs.variables, check)
        marks = tuple(image_texts)
        try:
            text, begun = self._render_opening(conversation, rendering, codec)
        finally:
            if cost_in_characters([flat], _LONG_CHARACTERS) < _LONG_CHARACTERS:
                # A template that takes longer is rendered on a thread too, until it takes less.
                self._is_quick = rendering.slowest_s < 0.02
        text += begun
        self._limit.check_rendered(codec.plain(text), counted, check)
        tokens = tuple(_encoded(text, codec))
        thinking = _thinking(text, begun, self._think)
        check()
        thinks, tools = thinking == "open", rendering.tools
        rendered = Rendered(conversation, tools, text, tokens, thinks, rendering.render_predicted, marks, codec)
        boundaries = self._boundaries(rendered) if self._boundaries else ()
        droppable = self._droppable(rendered) if self._droppable else ()
        return Prompt(tokens, thinking, boundaries, droppable, rendering.adapted)

    def _needs_escaping(self, inputs: Inputs) -> bool:
        return self._escaping is not None and self._escaping.needs_escaping(inputs)

    def _escaped(self, inputs: Inputs) -> tuple[Inputs, Codec]:
        """Return the template's inputs, with control tokens escaped if necessary, and the codec for its text."""
        if self._escaping is None or not self._escaping.needs_escaping(inputs):
            return inputs, Codec(self._tokenizer.encode)
        tokens = self._tokenizer.control_tokens
        return self._escaping.escaped(inputs), Codec(tokens.encode, tokens.unmark)

    def _render_opening(self, conversation: TemplateMessages, rendering: "_Rendering", codec: Codec) -> tuple[str, str]:
        try:
            text, begun = _opening(conversation, self._think, rendering.text_of)
        except TemplateFailed as failed:
            error = failed.__cause__
            does = "refuses" if isinstance(error, TemplateError) else "cannot render"
            reason = codec.plain(str(error))[:500]  # one of transformers' errors quotes the whole conversation
            message = f"The model's chat template {does} these messages: {reason}"
            raise JobFailure("invalid_request", message, param="messages") from error
        for why in rendering.adapted:
            self._log_once(why)
        if Flaw.NO_TOOLS in rendering.findings:
            message = "tools: the model's chat template does not support them; leave them out."
            raise JobFailure("unsupported", message, param="tools")
        return text, begun

    def _log_once(self, why: str) -> None:
        if why not in self._logged:
            self._logged.add(why)
            logger.info("The chat template %s.", why)


class _Rendering:
    """Renders one request's conversation, and variations of it."""

    def __init__(
        self, template: Callable[..., str], adapt: Adapt, accepted: TemplateInputs, tools: TemplateTools,
        variables: Variables, check: Check,
    ) -> None:  # fmt: skip
        """`template`: a tokenizer's `render` with the arguments that are the same in all trials."""
        self._template = template
        self._adapt = adapt
        self._accepted = accepted
        self.tools, self._variables, self.input_changes = accepted.known(tools, variables)
        self._check = check
        self.findings: list[Finding] = []  # reasons for the changes that were made
        self.slowest_s = 0.0  # processor time of the trial that took most

    def text_of(self, conversation: TemplateMessages, continues: bool) -> str:
        """Return the template's text, with the changes that it needs. `continues`: leave the last turn open."""
        try:
            text, findings = self._adapt(conversation, self.tools, partial(self._render, continues))
        except TemplateFailed:
            if not self._settle():
                raise
            text, findings = self._adapt(conversation, self.tools, partial(self._render, continues))
        self.findings += findings
        return text

    @property
    def adapted(self) -> tuple[str, ...]:
        """What was changed for the template, each with the reason."""
        return (*self.input_changes, *(finding.why for finding in self.findings))

    def _settle(self) -> bool:
        """Change tools and variables until the template accepts them. Returns False if they are not the cause."""
        settled = self._accepted.settle(self.tools, self._variables, self._render_short)
        if settled is None:
            return False
        self.tools, self._variables, changes = settled
        self.input_changes += changes
        return True

    def _render_short(self, tools: TemplateTools, variables: Variables) -> str:
        return self._rendered([{"role": "user", "content": "Hello"}], tools, variables, continues=False)

    def render_predicted(self, conversation: TemplateMessages) -> str:
        """Render a predicted conversation in one trial, with the same changes as the request's own."""
        for finding in self.findings:
            if isinstance(finding, Adaptation):
                conversation = finding.change(conversation)
        return self._render(False, conversation, self.tools)

    def _render(self, continues: bool, conversation: TemplateMessages, tools: TemplateTools) -> str:
        return self._rendered(conversation, tools, self._variables, continues=continues)

    def _rendered(
        self, conversation: TemplateMessages, tools: TemplateTools, variables: Variables, *, continues: bool
    ) -> str:
        """Render once. Raises `TemplateFailed`."""
        self._check()
        began = time.thread_time()
        try:
            return self._template(conversation, tools=tools, continues=continues, variables=variables)
        except JobFailure:  # of the tokenizer
            raise
        except Exception as error:  # a template is a program of the model's authors: it may raise whatever Python does
            raise TemplateFailed from error
        finally:
            self.slowest_s = max(self.slowest_s, time.thread_time() - began)


def _inputs(request: ChatRequest, variables: dict[str, Any]) -> Inputs:
    tools = [tool.model_dump(exclude_none=True) for tool in request.offered_tools]
    return Inputs(normalize(request.messages), tools, variables)


def _opening(
    conversation: TemplateMessages, think: Think, text_of: Callable[[TemplateMessages, bool], str]
) -> tuple[str, str]:
    """Return the template's text up to the answer, and the beginning of the answer, for the caller to append.

    A trailing assistant message is continued; else the template opens a new turn.
    """
    *before, last = conversation
    if last["role"] != "assistant" or "tool_calls" in last:
        return text_of(conversation, False), ""
    begun: str = last["content"]
    # Templates remove reasoning from assistant messages, so an answer that has some is appended, not rendered.
    if think and any(marker in begun for marker in think):
        text, start = text_of(before, False), think[0]
        if begun.lstrip().startswith(start) and text.rstrip().endswith(start):
            text = text.rstrip().removesuffix(start)  # the answer begins with the marker itself
        return text, begun
    if begun.strip():
        return text_of(conversation, True), ""
    if think and (thoughts := last.get("reasoning_content", "").strip()):
        text = text_of(conversation, True)
        if thoughts in text and text.rstrip().endswith(think[1]):
            return text, ""
    # The template writes no text of the message, so a new turn is opened: continuing it would strip the header's space.
    return text_of(before, False), ""


def _encoded(text: str, codec: Codec) -> list[int]:
    try:
        return codec.encode(text)
    except ValueError as error:
        reason = str(error)[:500]
        message = f"messages: a control token cannot be escaped; {reason}"
        raise JobFailure("invalid_request", message, param="messages") from error


def _thinking(text: str, begun: str, think: Think) -> Thinking:
    if think is None:
        return "none"
    start, end = think
    if start in begun or end in begun:
        return "open" if begun.rfind(start) > begun.rfind(end) else "closed"
    # Every template writes an end marker after a user's message, so the text never ends with a user's own words.
    text = text.rstrip()
    if text.endswith(start):
        return "open"
    return "closed" if text.endswith(end) else "none"


def _flattened(conversation: TemplateMessages, images: Sequence[str]) -> tuple[TemplateMessages, dict[str, str]]:
    """Return the conversation with strings for contents, and the images' texts by the characters that mark them.

    Many templates accept only strings. Raises `JobFailure` for images in the newest messages if the model is a text
    model.
    """
    if not images:
        conversation = _without_past_images(conversation)
    parts = [part for message in conversation if isinstance(message["content"], list) for part in message["content"]]
    num_images = sum(part["type"] != "text" for part in parts)
    if num_images > len(images):
        message = "messages: this model does not support images; leave out the image_url parts."
        raise JobFailure("unsupported", message, param="messages[].content[].image_url")
    marks = _unused_characters(conversation, num_images) if num_images else []
    unused = iter(marks)
    flat = [{**message, "content": _flat(message["content"], unused)} for message in conversation]
    return flat, dict(zip(marks, images, strict=True))


def _without_past_images(conversation: TemplateMessages) -> TemplateMessages:
    """Return the conversation with a text for each image that its client cannot take back: before the last turn of the
    assistant, and beside a result of a tool. Refused, it would end the session."""
    answers = [at for at, message in enumerate(conversation) if message["role"] == "assistant"]
    newest = answers[-1] + 1 if answers else 0
    if any(message["role"] == "tool" for message in conversation[newest:]):
        newest = len(conversation)
    past = map(_with_images_told, conversation[:newest])
    return [*past, *conversation[newest:]]


def _with_images_told(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message["content"], list):
        return message
    told = [part if part["type"] == "text" else _NO_VISION for part in message["content"]]
    return {**message, "content": told}


def _unused_characters(conversation: TemplateMessages, count: int) -> list[str]:
    """Return `count` characters that occur in no content."""
    written = set("".join(text for message in conversation for text in _texts(message["content"])))
    return list(islice((mark for mark in map(chr, _FOR_IMAGES) if mark not in written), count))


def _texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _flat(content: Any, marks: Iterator[str]) -> str:
    if isinstance(content, str):
        return content
    flat, before = "", ""
    for part in content:
        image = part["type"] != "text"
        after = next(marks) if image else part["text"]
        # Between an image and a text the template's own separator is enough.
        flat += after if image or not before else _gap(before, after) + after
        before = "" if image else after
    return flat


def _gap(before: str, after: str) -> str:
    """Return the separator of two text parts: a line break, as in other servers, unless one part is only space."""
    return "" if before.isspace() or after.isspace() else "\n"
