"""Drafts of what a grammar forces, and guesses where it leaves a choice: the token that was usual where the same tokens
were allowed."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from worker.engine.speculation.offer import Acceptance, DraftedRow, Offer, Proposer
from worker.outcomes import MAX_DRAFT
from worker.request import GrammarState

GRAMMAR = "grammar"
GUESS = "grammar_guess"

_FORCED = (GRAMMAR, 0)


@dataclass(frozen=True, slots=True)
class _Guess:
    """The usual token, and how often it was the right one, recent times counting more."""

    token: int
    right: float = 1.0
    compared: float = 1.0

    @property
    def acceptance(self) -> float:
        """Probability that the token is drawn: before any was, half of a guess counts as right."""
        return (self.right + 0.5) / (self.compared + 1)

    def after(self, token: int) -> "_Guess":
        """Return the guess after a token was drawn in its place."""
        memory = 0.9  # weight that an observation keeps when the next one is made
        right, compared = self.right * memory + (token == self.token), self.compared * memory + 1
        usual = right >= 0.4 * compared  # else the newest token becomes the usual one
        return _Guess(self.token if usual else token, right, compared)


class GuessTable:
    """A table of guesses by the set of tokens that a grammar allows: after a comma, a model mostly writes the same
    white space, and for a property often the same value. The entry that was not observed for the
    longest time is dropped."""

    def __init__(self) -> None:
        self._guesses = OrderedDict[int, _Guess]()  # by key

    def lookup(self, key: int) -> _Guess | None:
        """Return the guess for a set of allowed tokens, or None if it is new. `key`: its hash."""
        return self._guesses.get(key)

    def observe(self, key: int, token: int) -> None:
        """Record which token was drawn where these were allowed."""
        known = self._guesses.pop(key, None)
        self._guesses[key] = known.after(token) if known else _Guess(token)
        if len(self._guesses) > 1_024:  # some hundred bytes each. test_guesses.py
            self._guesses.popitem(last=False)


class GrammarProposer(Proposer):
    """Offers what a row's grammar forces. Where the grammar leaves a choice of few tokens, it offers the usual one, and
    what is forced after that."""

    def __init__(self) -> None:
        self._shared = Acceptance(lambda kind: 0.98)  # a model's tokens may be cut differently than the grammar's text
        self._rows = dict[str, _Row]()
        self._guesses = OrderedDict[str, GuessTable]()  # by namespace, so that no client's answers speed up another's

    def offer(self, row: DraftedRow) -> Offer | None:
        """Return a draft after the row's last token, or None if it has no grammar, or nothing is known to follow."""
        grammar = row.request.grammar
        if grammar is None or grammar.is_free or not grammar.takes_drafts:
            return None
        own, guesses = self._row(row), self._guesses_of(row.request.namespace)
        last = own.draft
        own.learn(row.answer, guesses)
        sure = own.acceptance.rate(_FORCED)
        if draft := last.continued(row.answer, sure):
            own.draft = draft
            return draft.offer()
        pending = [*row.answer[grammar.accepted :]]
        if pending and (len(pending) > MAX_DRAFT or grammar.valid_prefix(pending) < len(pending)):
            return None
        own.draft = _draft(grammar, pending, len(row.answer), guesses, sure)
        return own.draft.offer()

    def forget(self, row: DraftedRow) -> None:
        """Free what is held for a row."""
        self._rows.pop(row.id, None)

    def _row(self, row: DraftedRow) -> "_Row":
        if row.id not in self._rows:
            self._rows[row.id] = _Row(self._shared.of_row())
        return self._rows[row.id]

    def _guesses_of(self, namespace: str) -> GuessTable:
        guesses = self._guesses.setdefault(namespace, GuessTable())
        self._guesses.move_to_end(namespace)
        if len(self._guesses) > 64:  # namespaces
            self._guesses.popitem(last=False)
        return guesses


class _Row:
    """The last draft of a row, from which it learns."""

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance = acceptance
        self.draft = _Draft(0)

    def learn(self, answer: Sequence[int], guesses: GuessTable) -> None:
        """Compare the draft with what the answer has in its place, up to the first wrong token."""
        draft, self.draft = self.draft, _Draft(0)
        drawn = answer[draft.start : draft.start + len(draft.tokens) + 1]
        for index, token in enumerate(drawn):
            if index in draft.choices:
                guesses.observe(draft.choices[index], token)
            if index == len(draft.tokens):
                return
            right = token == draft.tokens[index]
            if draft.kinds[index] == GRAMMAR:
                self.acceptance.observe(_FORCED, right)
            if not right:
                return


class _Draft:
    """A draft that grows, and the choices that the grammar leaves on its way."""

    def __init__(self, start: int) -> None:
        """`start`: tokens of the answer before it."""
        self.start = start
        self.tokens = list[int]()
        self.acceptance = list[float]()
        self.kinds = list[str]()
        self._all_accepted = 1.0  # the probability that all its tokens are right
        self.choices = dict[int, int]()  # by the number of tokens before it: its key, see `GuessTable`
        self._rest: tuple[int, ...] = ()  # tokens that are forced after it

    def force(self, tokens: tuple[int, ...], rate: float) -> None:
        """Append tokens that the grammar forces."""
        room = MAX_DRAFT - len(self.tokens)
        for token in tokens[:room]:
            self._append(token, rate, GRAMMAR)
        self._rest = tokens[room:]

    def guess(self, mask: bytes, guesses: GuessTable) -> bool:
        """Append the usual token among those of a mask. Returns False if there is none, if it and all tokens before it
        are hardly ever right, or in free text: where a grammar allows more than an eighth of the vocabulary, no token
        is usual."""
        if int.from_bytes(mask, "little").bit_count() > len(mask):  # bits: a byte has eight
            return False
        key = hash(mask)
        self.choices[len(self.tokens)] = key
        guess = guesses.lookup(key)
        if guess is None or self._all_accepted * guess.acceptance < 0.2:
            return False
        self._append(guess.token, guess.acceptance, GUESS)
        return True

    def _append(self, token: int, rate: float, kind: str) -> None:
        self.tokens.append(token)
        self.acceptance.append(rate)
        self.kinds.append(kind)
        self._all_accepted *= rate

    def continued(self, answer: Sequence[int], rate: float) -> "_Draft | None":
        """Return a draft after the answer, if that has followed this one and enough is forced after it: a long text is
        not tokenized anew in each step. `rate`: acceptance rate of a forced token."""
        expected, drawn = (*self.tokens, *self._rest), len(answer) - self.start
        if len(expected) - drawn < MAX_DRAFT or tuple(answer[self.start :]) != expected[:drawn]:
            return None
        draft = _Draft(len(answer))
        draft.force(expected[drawn:], rate)
        return draft

    def offer(self) -> Offer | None:
        """Return the draft, or None if it is empty."""
        if not self.tokens:
            return None
        return Offer(GRAMMAR, tuple(self.tokens), tuple(self.acceptance), tuple(self.kinds))


def _draft(grammar: GrammarState, pending: Sequence[int], start: int, guesses: GuessTable, sure: float) -> _Draft:
    """Return what the grammar forces, with guesses between. `pending`: tokens that it has not accepted yet. `sure`: the
    acceptance rate of a forced token."""
    draft = _Draft(start)
    while len(draft.tokens) < MAX_DRAFT:
        ahead = grammar.ahead([*pending, *draft.tokens])
        if ahead.forced:
            draft.force(ahead.forced, sure)
        elif ahead.mask is None or not draft.guess(ahead.mask, guesses):
            break
    return draft
