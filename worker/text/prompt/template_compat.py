"""Changes a conversation until the model's chat template accepts it and writes all of it."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from typing import Any

from worker.text.prompt.template_changes import (
    AS_PARTS,
    LATER_SYSTEMS,
    SYSTEM_FIRST,
    SYSTEM_IN_USER,
    TEXT_APART,
    Adaptation,
    CallMarks,
    WriteCalls,
    ladders,
    results_by_call,
    split_system,
    write_as_json,
)
from worker.text.prompt.template_inputs import TemplateFailed, TemplateTools
from worker.text.tokenizer import TemplateMessages


class Flaw(Enum):
    """A defect of a template that no change avoids."""

    NO_TOOLS = "does not support tools"
    OMITS = "omits texts, tool calls or results, in every form that was tried"
    FIRST_AS_USER = "writes a first assistant turn as a user turn, in every form that was tried"

    @property
    def why(self) -> str:
        """Description of the defect, for the log."""
        return str(self.value)


Finding = Adaptation | Flaw
Think = tuple[str, str] | None
Ladder = tuple[Adaptation, ...]
Render = Callable[[TemplateMessages, TemplateTools], str]
Adapt = Callable[[TemplateMessages, TemplateTools, Render], tuple[str, list[Finding]]]


_PRINTED_PARTS = ("'type': 'text'", '"type": "text"')


class NeedsAdaptation(Exception):
    """The template refuses the unchanged conversation, or omits a part of it."""


class TemplateAdapter:
    """Adapts conversations to one chat template; a worker has one.

    It remembers the changes that were necessary before. That saves trials and changes no result.
    """

    def __init__(self, think: Think = None, write_calls: WriteCalls = write_as_json) -> None:
        """`think`: the markers around reasoning, which templates may omit. `write_calls`: writes calls in the model's
        dialect, for a template that writes none."""
        self._think = think
        self._ladders = ladders(write_calls)
        self._needed = defaultdict[Ladder, set[Adaptation]](set)  # needed by any request so far
        self._takes_later_systems: bool | None = None  # not known before the first conversation that has one

    def render_unchanged(
        self, conversation: TemplateMessages, tools: TemplateTools, render: Render
    ) -> tuple[str, list[Finding]]:
        """Return what `adapt` returns for a conversation in which at most system messages were changed, with one trial.
        Raises `NeedsAdaptation`."""
        if _has_later_systems(conversation) and self._takes_later_systems is None:
            raise NeedsAdaptation
        conversation, changes = self._with_systems_taken(conversation, tools, render)
        trials = _Trials(tools, render, self._think)
        text = trials.complete_text(conversation)
        if text is None or not trials.has_text_beside_calls(conversation, text):
            raise NeedsAdaptation
        return text, changes

    def adapt(self, conversation: TemplateMessages, tools: TemplateTools, render: Render) -> tuple[str, list[Finding]]:
        """Return the template's text, and the changes that it needed; none if it accepts the conversation unchanged.

        A text that omits a part of the conversation is not accepted, unless every text omits something: then the first
        text is returned, with its flaws. If every trial raises, raises the error of the unchanged conversation.
        """
        conversation, changes = self._with_systems_taken(conversation, tools, render)
        try:
            text, findings = self._adapted(conversation, tools, render)
        except TemplateFailed:
            in_parts = self._in_parts(conversation, tools, render)
            if in_parts is None:
                raise
            text, findings = in_parts
        else:
            if Flaw.OMITS in findings:
                text, findings = self._in_parts(conversation, tools, render) or (text, findings)
        return text, [*changes, *findings]

    def _with_systems_taken(
        self, conversation: TemplateMessages, tools: TemplateTools, render: Render
    ) -> tuple[TemplateMessages, list[Finding]]:
        """Return the conversation with its later system messages as the template takes them, and the change.

        The template decides, and no single conversation: else a turn that follows could change what is before it.
        """
        if not _has_later_systems(conversation):
            return conversation, []
        if self._takes_later_systems is None:
            with suppress(TemplateFailed):  # the tools or variables of this request, which the next may not have
                self._takes_later_systems = _takes_later_systems(lambda said: render(said, tools))
        if self._takes_later_systems:
            return conversation, []
        return LATER_SYSTEMS.change(conversation), [LATER_SYSTEMS]

    def _in_parts(
        self, conversation: TemplateMessages, tools: TemplateTools, render: Render
    ) -> tuple[str, list[Finding]] | None:
        """Return what `adapt` returns if all contents are lists of parts; None if that does not help."""
        try:
            text, findings = self._adapted(
                conversation, tools, lambda changed, offered: render(AS_PARTS.change(changed), offered)
            )
        except TemplateFailed:
            return None
        # A template that expects strings may print the lists themselves.
        printed = any(sign in text and sign not in str(conversation) for sign in _PRINTED_PARTS)
        return None if Flaw.OMITS in findings or printed else (text, [*findings, AS_PARTS])

    def _adapted(
        self, conversation: TemplateMessages, tools: TemplateTools, render: Render
    ) -> tuple[str, list[Finding]]:
        trials = _Trials(tools, render, self._think)
        text = trials.complete_text(conversation)
        if text is not None:
            return self._with_all_text(text, [], conversation, trials)
        tried = set[Ladder]()
        for ladder in self._ladders_for(tools):
            changes = _effective(ladder, conversation)
            if changes in tried:
                continue
            tried.add(changes)
            if found := self._fewest(ladder, changes, conversation, trials):
                needed, text = found
                self._needed[ladder].update(needed)
                return self._with_all_text(text, needed, conversation, trials)
        return trials.first_text()

    def _with_all_text(
        self, text: str, changes: list[Adaptation], conversation: TemplateMessages, trials: "_Trials"
    ) -> tuple[str, list[Finding]]:
        """Return the text, or one in which the text beside calls is not dropped, if the template accepts that."""
        if trials.has_text_beside_calls(conversation, text):
            return text, list(changes)
        with_apart = [*changes, TEXT_APART]
        apart = _changed(conversation, with_apart)
        more = trials.complete_text(apart)
        return (text, list(changes)) if more is None else (more, list(with_apart))

    def _ladders_for(self, tools: TemplateTools) -> Iterator[Ladder]:
        for ladder in self._ladders:
            if tools:
                yield (*ladder, SYSTEM_FIRST)
            yield (*ladder, SYSTEM_IN_USER)

    def _fewest(
        self, ladder: Ladder, effective: Ladder, conversation: TemplateMessages, trials: "_Trials"
    ) -> tuple[list[Adaptation], str] | None:
        """Return those of the ladder's `effective` changes that the template needs, and its text. None if all of them
        together fail."""
        changes = list(effective)
        text = trials.complete_text(_changed(conversation, changes))
        if text is None:
            return None
        # If the changes that earlier requests needed are enough, so is every larger set: this trial replaces most of
        # those below.
        likely = [each for each in changes if each in self._needed[ladder]]
        enough = trials.complete_text(_changed(conversation, likely)) if likely else None
        for adaptation in reversed(changes):
            fewer = [each for each in changes if each is not adaptation]
            if enough is not None and adaptation not in likely:
                changes, text = fewer, enough
            elif fewer and (without := trials.complete_text(_changed(conversation, fewer))) is not None:
                changes = fewer
                text = without
                enough = None
        return changes, text


class _Trials:
    """Renderings of one request's conversation, and the parts that each of them omits."""

    def __init__(self, tools: TemplateTools, render: Render, think: Think) -> None:
        self._tools = tools
        self._render = render
        self._think = think
        self._texts: list[tuple[str, list[Finding]]] = []  # each with its flaws
        self._errors: list[Exception] = []

    def complete_text(self, conversation: TemplateMessages) -> str | None:
        """Return the template's text, or None if it refuses the conversation or omits a part of it."""
        try:
            text = self._render(conversation, self._tools)
        except TemplateFailed as error:
            self._errors.append(error)
            return None
        missing = self._missing(conversation, text)
        self._texts.append((text, missing))
        return None if missing else text

    def has_text_beside_calls(self, conversation: TemplateMessages, text: str) -> bool:
        """True if the template's text holds the text beside each call."""
        beside = [turn["content"] for turn in conversation if "tool_calls" in turn and turn["content"]]
        return not beside or _in_order(beside, text)

    def first_text(self) -> tuple[str, list[Finding]]:
        """Return the first text and its flaws. Raises the first error if there is no text."""
        if not self._texts:
            raise self._errors[0]
        return self._texts[0]

    def _missing(self, conversation: TemplateMessages, text: str) -> list[Finding]:
        missing = list[Finding]()
        written = _is_in(conversation, text, self._think) and self._has_calls(conversation, text)
        if not written or self._renders_same(text, _with_other_results(conversation), self._tools):
            missing.append(Flaw.OMITS)
        of_a_user = _with_first_as_user(conversation)
        if of_a_user != conversation and self._renders_same(text, of_a_user, self._tools):
            missing.append(Flaw.FIRST_AS_USER)
        if self._tools and self._renders_same(text, conversation, []):
            missing.append(Flaw.NO_TOOLS)
        return missing

    def _has_calls(self, conversation: TemplateMessages, text: str) -> bool:
        """True if the text shows each call, in order.

        A function's name in the text proves nothing, since a user may have written it. So each call is rendered again
        with a unique mark.
        """
        if not any("tool_calls" in turn for turn in conversation):
            return True
        marks = CallMarks(text)
        try:
            return marks.all_found(self._render(marks.add_to(conversation), self._tools))
        except TemplateFailed:  # the template refuses a name with a mark
            return not self._renders_same(text, _with_fewer_calls(conversation), self._tools)

    def _renders_same(self, text: str, conversation: TemplateMessages, tools: TemplateTools) -> bool:
        """True if this conversation renders to the same text, so that the text omits the difference."""
        if not conversation:
            return False
        try:
            return self._render(conversation, tools) == text
        except TemplateFailed:
            return False


def _has_later_systems(conversation: TemplateMessages) -> bool:
    return any(message["role"] == "system" for message in conversation[1:])


def _takes_later_systems(render: Callable[[TemplateMessages], str]) -> bool:
    """Return True if the template writes each system message where it stands, in nobody else's name, and leaves what is
    before it as it was. Raises `TemplateFailed` if it fails without system messages."""
    words = [f"later{number}x" for number in range(10)]

    def said(*roles: str, by: str = "system") -> TemplateMessages:
        return [
            {"role": by if role == "system" and at else role, "content": words[at]} for at, role in enumerate(roles)
        ]

    def written(conversation: TemplateMessages) -> str:
        try:
            return render(conversation)
        except TemplateFailed:
            return ""

    question, rest = ("user", "assistant", "user"), ("assistant", "system", "user", "system", "assistant", "user")
    render(said(*question))
    for first in (question, ("system", *question)):
        roles = (*first, *rest)
        # As far as the last question: templates drop thoughts, or their markers, before a later one.
        before = written(said(*first)).partition(words[len(first) - 1])[0]
        for count in range(len(first) + 2, len(roles) + 1):
            text = written(said(*roles[:count]))
            if not text.startswith(before) or not _in_order(words[:count], text):
                return False
        if text in (written(said(*roles, by="assistant")), written(said(*roles, by="tool"))):
            return False
    return True


def _effective(ladder: Ladder, conversation: TemplateMessages) -> Ladder:
    """Return those of the ladder's changes that change the conversation, one after the other."""
    matter = list[Adaptation]()
    for adaptation in ladder:
        changed = adaptation.change(conversation)
        if changed != conversation:
            matter.append(adaptation)
            conversation = changed
    return tuple(matter)


def _changed(conversation: TemplateMessages, adaptations: Iterable[Adaptation]) -> TemplateMessages:
    for adaptation in adaptations:
        conversation = adaptation.change(conversation)
    return conversation


def _with_fewer_calls(conversation: TemplateMessages) -> TemplateMessages:
    """Return the turns with only their first call, or without calls if no turn has more than one.

    gpt-oss's template writes only the first call of a turn.
    """
    kept = 1 if any(len(turn.get("tool_calls", ())) > 1 for turn in conversation) else 0
    return [
        {**turn, "tool_calls": turn["tool_calls"][:kept]} if "tool_calls" in turn else turn for turn in conversation
    ]


def _with_other_results(conversation: TemplateMessages) -> TemplateMessages:
    """Return the conversation with other texts of lone results; empty if there are none. Their own may be anywhere in a
    template's text."""
    if any("tool_calls" in turn for turn in conversation) or all(turn["role"] != "tool" for turn in conversation):
        return []
    return [{**turn, "content": f"{turn['content']}~"} if turn["role"] == "tool" else turn for turn in conversation]


def _with_first_as_user(conversation: TemplateMessages) -> TemplateMessages:
    """Return the conversation with a first assistant turn as a user turn.

    Llama 3.1's template writes the tools and the first turn, of either role, as one user turn.
    """
    system, turns = split_system(conversation)
    if not turns or turns[0]["role"] != "assistant":
        return conversation
    return [*system, {"role": "user", "content": turns[0]["content"]}, *turns[1:]]


def _is_in(conversation: TemplateMessages, text: str, think: Think) -> bool:
    """True if the text holds each content, in order within its role; results may be in the order of their calls.

    Some templates silently omit contents. That is accepted for reasoning, and for text that comes with a call.
    """
    by_role: dict[str, list[str]] = {}
    for message in conversation:
        if "tool_calls" not in message:
            by_role.setdefault(message["role"], []).append(_expected_text(message, think))
    results = by_role.pop("tool", [])
    if not all(_in_order(texts, text) for texts in by_role.values()):
        return False
    if _in_order(results, text):
        return True
    by_call = [turn["content"] for turn in results_by_call(conversation) if turn["role"] == "tool"]
    return by_call != results and _in_order(by_call, text)


def _expected_text(message: dict[str, Any], think: Think) -> str:
    content: str = message["content"]
    return content.rpartition(think[1])[2] if think and message["role"] == "assistant" else content


def _in_order(words: Iterable[str], text: str) -> bool:
    """True if the text holds the words in this order.

    Each search starts after the last match: searches from the beginning would take seconds in a long text.
    """
    end = 0
    for word in words:
        found = word.strip()
        start = text.find(found, end)
        if start < 0:
            found = _unchanged_piece(word)
            start = text.find(found, end)
        if start < 0:
            return False
        end = start + len(found)
    return True


def _unchanged_piece(words: str) -> str:
    """Return the longest piece that trimming, indenting and JSON leave unchanged, without our marks (private use)."""
    return max(re.split(r'["\\\x00-\x1f\ue000-\uf8ff\U000f0000-\U0010ffff]', words), key=len).strip()
