"""Conversations as a chat template takes them, where it does not take them as they are."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

from jinja2 import TemplateError

from worker.text.adaptations import (
    LADDERS,
    SYSTEM_FIRST,
    SYSTEM_IN_USER,
    Adaptation,
    CallMarks,
    parted,
)
from worker.text.tokenizer import Conversation

# A template's refusals, and its slips on what it did not expect. mlx-lm's own, which are in Python, assert.
RAISED = (TemplateError, TypeError, KeyError, ValueError, AssertionError)


class Flaw(Enum):
    """What a template does that no change prevents."""

    TAKES_NO_TOOLS = "takes no tools"
    LEAVES_OUT = "leaves out texts, tool calls or results, however they come"
    FIRST_AS_USER = "writes an assistant's first words as a user's, however they come"

    @property
    def why(self) -> str:
        return str(self.value)


Finding = Adaptation | Flaw
Think = tuple[str, str] | None
Ladder = tuple[Adaptation, ...]
Tools = list[dict[str, Any]]
Render = Callable[[Conversation, Tools], str]
Adapt = Callable[[Conversation, Tools, Render], tuple[str, list[Finding]]]


class NotTaken(Exception):
    """The template refuses the conversation as it is, or leaves something out."""


class Adapter:
    """A worker has one. It remembers what its template made necessary, which saves trials and changes no result."""

    def __init__(self, think: Think = None) -> None:
        """`think`: the markers around reasoning, which templates leave out."""
        self._think = think
        self._needed = defaultdict[Ladder, set[Adaptation]](set)  # ever

    def as_it_is(self, conversation: Conversation, tools: Tools, render: Render) -> tuple[str, list[Finding]]:
        """As `adapt`, by one trial. Raises `NotTaken`."""
        text = _Trials(tools, render, self._think).whole(conversation)
        if text is None:
            raise NotTaken
        return text, []

    def adapt(self, conversation: Conversation, tools: Tools, render: Render) -> tuple[str, list[Finding]]:
        """The text, and the changes that the template made necessary: nothing where it takes all as it is.

        A template that leaves something out has not taken it. If it does so whatever we change, its first text is
        good enough. Raises what it raised for the conversation as it is.
        """
        trials = _Trials(tools, render, self._think)
        text = trials.whole(conversation)
        if text is not None:
            return text, []
        for ladder in _ladders(tools):
            if found := self._fewest(ladder, conversation, trials):
                needed, text = found
                self._needed[ladder].update(needed)
                return text, list(needed)
        return trials.good_enough()

    def _fewest(
        self, ladder: Ladder, conversation: Conversation, trials: "_Trials"
    ) -> tuple[list[Adaptation], str] | None:
        """Of the ladder's changes, those that the template cannot do without. None where all of them do not help."""
        changes = _that_matter(ladder, conversation)
        text = trials.whole(_changed(conversation, changes))
        if text is None:
            return None
        # If those that were needed before are enough, then so are they with some others beside them: most of the
        # trials below are answered by this one.
        likely = [each for each in changes if each in self._needed[ladder]]
        enough = trials.whole(_changed(conversation, likely)) if likely else None
        for adaptation in reversed(changes):
            fewer = [each for each in changes if each is not adaptation]
            if enough is not None and adaptation not in likely:
                changes, text = fewer, enough
            elif fewer and (without := trials.whole(_changed(conversation, fewer))) is not None:
                changes, text, enough = fewer, without, None
        return changes, text


class _Trials:
    def __init__(self, tools: Tools, render: Render, think: Think) -> None:
        self._tools, self._render, self._think = tools, render, think
        self._texts: list[tuple[str, list[Finding]]] = []  # each with what is wrong with it
        self._errors: list[Exception] = []

    def whole(self, conversation: Conversation) -> str | None:
        """None where the template refuses, or leaves something out."""
        try:
            text = self._render(conversation, self._tools)
        except RAISED as error:
            self._errors.append(error)
            return None
        missing = self._missing(conversation, text)
        self._texts.append((text, missing))
        return None if missing else text

    def good_enough(self) -> tuple[str, list[Finding]]:
        if not self._texts:
            raise self._errors[0]
        return self._texts[0]

    def _missing(self, conversation: Conversation, text: str) -> list[Finding]:
        missing = list[Finding]()
        if not (_is_in(conversation, text, self._think) and self._has_calls(conversation, text)):
            missing.append(Flaw.LEAVES_OUT)
        of_a_user = _with_first_as_user(conversation)
        if of_a_user != conversation and self._makes(text, of_a_user, self._tools):
            missing.append(Flaw.FIRST_AS_USER)
        if self._tools and self._makes(text, conversation, []):
            missing.append(Flaw.TAKES_NO_TOOLS)
        return missing

    def _has_calls(self, conversation: Conversation, text: str) -> bool:
        """Whether each call is shown, and in order. Names prove nothing: they may be a user's own words, so each is
        looked for with a mark of its own."""
        if not any("tool_calls" in turn for turn in conversation):
            return True
        marks = CallMarks(text)
        try:
            return marks.all_in(self._render(marks.into(conversation), self._tools))
        except RAISED:  # it takes no name with a mark
            return not self._makes(text, _with_fewer_calls(conversation), self._tools)

    def _makes(self, text: str, conversation: Conversation, tools: Tools) -> bool:
        """What makes no difference was left out."""
        try:
            return self._render(conversation, tools) == text
        except RAISED:
            return False


def _ladders(tools: Tools) -> Iterator[Ladder]:
    for ladder in LADDERS:
        if tools:
            yield (*ladder, SYSTEM_FIRST)
        yield (*ladder, SYSTEM_IN_USER)


def _that_matter(ladder: Ladder, conversation: Conversation) -> list[Adaptation]:
    matter = []
    for adaptation in ladder:
        changed = adaptation.change(conversation)
        if changed != conversation:
            matter.append(adaptation)
            conversation = changed
    return matter


def _changed(conversation: Conversation, adaptations: Iterable[Adaptation]) -> Conversation:
    for adaptation in adaptations:
        conversation = adaptation.change(conversation)
    return conversation


def _with_fewer_calls(conversation: Conversation) -> Conversation:
    """Turns with their first call alone, which is all that gpt-oss's reads; where none has more, without."""
    kept = 1 if any(len(turn.get("tool_calls", ())) > 1 for turn in conversation) else 0
    return [
        {**turn, "tool_calls": turn["tool_calls"][:kept]} if "tool_calls" in turn else turn for turn in conversation
    ]


def _with_first_as_user(conversation: Conversation) -> Conversation:
    """Where an assistant speaks first, in a user's name: Llama 3.1's writes tools and the first turn as one."""
    system, turns = parted(conversation)
    if not turns or turns[0]["role"] != "assistant":
        return conversation
    return [*system, {"role": "user", "content": turns[0]["content"]}, *turns[1:]]


def _is_in(conversation: Conversation, text: str, think: Think) -> bool:
    """Each text, in order within its role. Some templates leave texts out without a word: they may do so with
    reasoning, and with what is said beside a call."""
    by_role: dict[str, list[str]] = {}
    for message in conversation:
        if "tool_calls" not in message:
            by_role.setdefault(message["role"], []).append(_told(message, think))
    return all(_in_order(texts, text) for texts in by_role.values())


def _told(message: dict[str, Any], think: Think) -> str:
    content: str = message["content"]
    return content.rpartition(think[1])[2] if think and message["role"] == "assistant" else content


def _in_order(words: Iterable[str], text: str) -> bool:
    """Each is looked for behind the one before: from the beginning it would take seconds in a long text."""
    end = 0
    for word in words:
        found = word.strip()
        start = text.find(found, end)
        if start < 0:
            found = _sturdy(word)
            start = text.find(found, end)
        if start < 0:
            return False
        end = start + len(found)
    return True


def _sturdy(words: str) -> str:
    """The longest piece that trimming, indenting and JSON leave as it is. Characters for private use are marks."""
    return max(re.split(r'["\\\x00-\x1f\ue000-\uf8ff\U000f0000-\U0010ffff]', words), key=len).strip()
