"""Grammars for rows: some constrain the answer, and some fail. Each is described by a value, its plan, so that equal
ones can be made for the engine and for the reference."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import count

from tests.engine.machine.families import Family
from tests.engine.machine.faults import OnPurpose
from tests.engine.stepwise_grammar import StepwiseGrammar
from worker.engine.tokenizer import MLXTokenizer
from worker.request import GrammarState
from worker.text.grammar.lark import Grammar
from worker.text.grammar.llg_tokenizer import llguidance_tokenizer
from worker.text.grammar.row.grammar import RowGrammar
from worker.text.grammar.row.thought import ThoughtLimit
from worker.text.grammar.sandbox import compile_grammar
from worker.text.output.thought import Closing, Thought, ThoughtFormat
from worker.text.tokenizer import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "boolean"}},
    "required": ["b"],
    "additionalProperties": False,
}


class _Recording(StepwiseGrammar):
    """Allows every token."""

    error = None

    def __init__(self) -> None:
        self.answer = list[int]()

    @property
    def accepted(self) -> int:
        return len(self.answer)

    def accept(self, token: int) -> None:
        self.answer.append(token)

    def reset(self) -> None:
        self.answer.clear()

    def rollback(self, count: int) -> None:
        del self.answer[len(self.answer) - count :]

    def bitmask(self) -> bytes | None:
        return None


class _Picky(_Recording):
    """Forbids another third of the vocabulary after each token, chosen by the whole answer so far."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self._family = family

    def bitmask(self) -> bytes:
        return _two_thirds(self._family, sum(at * token for at, token in enumerate(self.answer, start=1)) % 3)


class _Forcing(_Recording):
    """Allows a single token at one place of the answer."""

    def __init__(self, token: int, at: int) -> None:
        super().__init__()
        self._token, self._at = token, at

    def bitmask(self) -> bytes | None:
        return _mask([self._token], self._token + 1) if len(self.answer) == self._at else None


class _Raising(_Recording):
    """Raises once `at` tokens are accepted."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def bitmask(self) -> None:
        if len(self.answer) >= self._at:
            raise OnPurpose("This grammar fails.")


class _Forbidding(_Recording):
    """Forbids every token at one place of the answer, so that no logit is finite."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def bitmask(self) -> bytes | None:
        return b"" if len(self.answer) == self._at else None


@cache
def _two_thirds(family: Family, left_out: int) -> bytes:
    count = family.model.vocab
    return _mask([token for token in range(count) if token % 3 != left_out or token == family.end], count)


def _mask(allowed: list[int], count: int) -> bytes:
    return sum(1 << token for token in allowed).to_bytes(-(-count // 32) * 4, "little")


@dataclass(frozen=True)
class Json:
    """An object after `SCHEMA`, by llguidance. `slow`: each of its works for a draft takes as long as a row may save up
    nearly."""

    slow: bool = False


@dataclass(frozen=True)
class Picky:
    pass


@dataclass(frozen=True)
class Closes:
    """The thoughts with which an answer begins, and those after it, have a budget. `then`: of the answer itself."""

    budget: int
    then: Picky | None = None


@dataclass(frozen=True)
class Forces:
    token: int
    at: int


@dataclass(frozen=True)
class Raises:
    at: int


@dataclass(frozen=True)
class Forbids:
    at: int


Plan = Json | Picky | Closes | Forces | Raises | Forbids


def _text_of(token: int) -> bytes:
    """Return a text for each token, so that answers of random models have thoughts of all lengths."""
    if token % 11 == 0:
        return b"</think>"
    return b"<think>" if token % 7 == 0 else b"word "


_THOUGHTS = ThoughtFormat(b"<think>", b"</think>", 1, _text_of, (Closing((20,), (22, 23)),), reopens=True)


def make(family: Family, plan: Plan | None) -> GrammarState | None:
    match plan:
        case Json(slow):
            return _json(family, count(0.0, 0.001_5).__next__ if slow else lambda: 0.0)
        case Picky():
            return _Picky(family)
        case Closes(budget, then):
            new_thought = partial(Thought, _THOUGHTS, begun=True, only_first=False, budget=budget)
            return ThoughtLimit(new_thought, make(family, then), family.model.vocab)
        case Forces(token, at):
            return _Forcing(token, at)
        case Raises(at):
            return _Raising(at)
        case Forbids(at):
            return _Forbidding(at)
        case None:
            return None


def without_failure(plan: Plan | None) -> Plan | None:
    """Return the plan of a grammar that allows the same and does not fail."""
    return None if isinstance(plan, Raises | Forbids) else plan


def _json(family: Family, clock: Callable[[], float]) -> GrammarState:
    tokenizer = MLXTokenizer(family.model.tokenizer)
    vocabulary = llguidance_tokenizer(tokenizer, Vocabulary(tokenizer), family.model.vocab)
    assert vocabulary is not None
    grammar = Grammar({})
    written = grammar.starting_with(grammar.json(SCHEMA, "response_format"))
    matcher, drafts = (compile_grammar(vocabulary, written) for _ in range(2))
    return RowGrammar(matcher, frozenset({family.end}), drafts=drafts, clock=clock)
