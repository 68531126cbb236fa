"""Drafts of what a grammar leaves no choice about, and of the punctuation between."""

from collections import OrderedDict

from worker.schedule.request import GrammarState
from worker.schedule.speculation.chances import RowChances, SharedChances
from worker.schedule.speculation.offer import MAX_DRAFT, DraftedRow, Offer

GRAMMAR = "grammar"

_FORCED = (GRAMMAR, 0)
_SURE = 0.98  # a model's tokens may be cut differently than the grammar's text
_LEAST_GUESS = 0.6  # chance of a guess below which a draft ends before it
_NAMESPACES = 64
_HABITS = 512  # of a namespace
_MEMORY = 0.9


class Habits:
    """Which token has followed another one in constrained answers: where a grammar allows white space or none, and
    where a name begins, a model mostly writes the same. The least recently seen is forgotten."""

    def __init__(self) -> None:
        self._next = OrderedDict[int, tuple[int, float, float]]()  # by token: the next, right and compared

    def guess(self, token: int) -> tuple[int, float] | None:
        """Return the usual next token, and its chance."""
        if token not in self._next:
            return None
        following, right, compared = self._next[token]
        return following, right / compared

    def observe(self, token: int, following: int) -> None:
        """Record that a token was followed by another one."""
        usual, right, compared = self._next.pop(token, (following, 0.0, 1.0))
        right, compared = right * _MEMORY + (usual == following), compared * _MEMORY + 1
        replaced = right < 0.4 * compared and usual != following
        self._next[token] = (following, 1.0, 2.0) if replaced else (usual, right, compared)
        if len(self._next) > _HABITS:
            self._next.popitem(last=False)


class GrammarProposer:
    """Offers what a row's grammar forces, and goes on after a guess by habit if that leads to more."""

    def __init__(self) -> None:
        self._shared = SharedChances(lambda kind: _SURE)
        self._chances = dict[str, RowChances]()
        self._observed = dict[str, int]()  # tokens of each row's answer
        self._habits = OrderedDict[str, Habits]()  # by namespace, so that no client's answers speed up another's

    def offer(self, row: DraftedRow) -> Offer | None:
        """Return a draft after the row's last token, or None if the grammar leaves a choice, or there is none."""
        grammar = row.request.grammar
        if grammar is None or grammar.error or not row.answer:
            return None
        habits = self._learn(row)
        pending = row.answer[grammar.accepted :]
        if len(pending) > MAX_DRAFT or grammar.valid_prefix(pending) < len(pending):
            return None
        for token in pending:
            grammar.accept(token)
        draft = self._draft(grammar, row.answer[-1], habits, self._chance_of(row))
        grammar.rollback(len(pending))
        return Offer(GRAMMAR, *draft) if draft else None

    def kept(self, row: DraftedRow, offered: int, kept_tokens: int) -> None:
        """Record how many tokens of a draft were right."""
        self._chance_of(row).observe_draft(_FORCED, offered, kept_tokens)

    def forget(self, row: DraftedRow) -> None:
        """Free what is held for a row."""
        self._chances.pop(row.id, None)
        self._observed.pop(row.id, None)

    def _chance_of(self, row: DraftedRow) -> RowChances:
        return self._chances.setdefault(row.id, RowChances(self._shared))

    def _learn(self, row: DraftedRow) -> Habits:
        habits = self._habits.setdefault(row.request.namespace, Habits())
        self._habits.move_to_end(row.request.namespace)
        if len(self._habits) > _NAMESPACES:
            self._habits.popitem(last=False)
        start = max(1, self._observed.get(row.id, 1))
        for place in range(start, len(row.answer)):
            habits.observe(row.answer[place - 1], row.answer[place])
        self._observed[row.id] = max(start, len(row.answer))
        return habits

    def _draft(
        self, grammar: GrammarState, last: int, habits: Habits, chances: RowChances
    ) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
        """Return the draft's tokens and their chances. Leaves the grammar as it was."""
        tokens, found = list[int](), list[float]()
        forced = 0
        while len(tokens) < MAX_DRAFT:
            ahead = [(token, chances.chance(_FORCED)) for token in grammar.forced()[: MAX_DRAFT - len(tokens)]]
            forced += len(ahead)
            ahead = ahead or _guessed(grammar, habits, tokens[-1] if tokens else last)
            if not ahead:
                break
            for token, chance in ahead:
                grammar.accept(token)
                tokens.append(token)
                found.append(chance)
        grammar.rollback(len(tokens))
        return (tuple(tokens), tuple(found)) if forced else None


def _guessed(grammar: GrammarState, habits: Habits, last: int) -> list[tuple[int, float]]:
    guess = habits.guess(last)
    if guess is None or guess[1] < _LEAST_GUESS or not grammar.valid_prefix(guess[:1]):
        return []
    return [guess]
