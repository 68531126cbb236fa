"""What an answer may go on with, where a client wants it in a form: each row has its own guide."""

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer

from schemas import ChatRequest
from worker.errors import Refusal
from worker.text.dialect import Dialect
from worker.text.grammar import Grammars, Wish, wish_of
from worker.text.prompt import Prompt
from worker.text.tokenizer import Tokenizer
from worker.text.trial import Uncompilable, compiled, complaint, error_of

logger = logging.getLogger("sluice.text")

_LONGEST_REASON = 300  # characters; llguidance's may hold a whole pattern


class Guides:
    """A worker has one."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """`vocab` is the width of the network's logits."""
        self._count = max(vocab, len(tokenizer.tokens))
        self._ends = tokenizer.eos_token_ids
        self._vocabulary = _vocabulary(tokenizer, self._count)
        self._grammars = Grammars(tokenizer)
        # Reasoning does not end the answer, nor go over into a call that no grammar holds.
        begins = tokenizer.encode(tokenizer.tool[0]) if tokenizer.tool else []
        self._reasonable = _all_but(self._ends | set(begins if len(begins) == 1 else []), self._count)
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="grammar")

    async def guide(self, request: ChatRequest, prompt: Prompt, dialect: Dialect) -> "GrammarGuide | None":
        """None where the answer may be anything. Raises `Refusal` for what cannot be held to."""
        wish = wish_of(request)
        if wish is None:
            return None
        if self._vocabulary is None:
            raise Refusal("unsupported", f"{wish.field}: this model's tokenizer cannot be guided; leave it out.")
        thoughts = self._thoughts(prompt, dialect)
        run = asyncio.get_running_loop().run_in_executor
        matcher = await run(self._compilers, self._matcher, self._vocabulary, wish, thoughts is not None)
        return GrammarGuide(matcher, self._ends, thoughts)

    def _thoughts(self, prompt: Prompt, dialect: Dialect) -> "Thoughts | None":
        if self._grammars.harmony or prompt.thinking == "closed" or not dialect.answer_begins:
            return None
        begun = prompt.thinking == "open"
        return Thoughts(dialect.think_start[0], dialect.answer_begins, self._reasonable, begun=begun)

    def _matcher(self, vocabulary: LLTokenizer, wish: Wish, reasoned: bool) -> LLMatcher:
        """Compiled anew for each row, in a thread: copies of a matcher share its lexer, and what breaks it."""
        if (wrong := self._complaint(wish)) is None:
            try:
                return compiled(vocabulary, self._grammars.of(wish, reasoned=reasoned))
            except Uncompilable as error:
                wrong = str(error)
        where = next((where for where, part in wish.parts() if self._complaint(part)), wish.field)
        reason = " ".join(wrong.split())[:_LONGEST_REASON]
        raise Refusal("invalid_request", f"{where}: no answer can be held to this schema: {reason}")

    def _complaint(self, wish: Wish) -> str | None:
        return complaint(self._grammars.spelled(wish))


def _vocabulary(tokenizer: Tokenizer, count: int) -> LLTokenizer | None:
    """As llguidance reads it, which takes a second for a large one and lets no other thread run meanwhile, so it is
    done before the first job. None where it cannot."""
    if tokenizer.definition is None:
        return None
    try:
        return LLTokenizer(tokenizer.definition, n_vocab=count, eos_token=sorted(tokenizer.eos_token_ids))
    except ValueError as error:
        logger.info("llguidance cannot read this tokenizer, so answers cannot be held to a form: %s", error)
        return None


def _all_but(tokens: Iterable[int], count: int) -> bytes:
    """A mask, as guides give it, of so many tokens without these."""
    bits = (1 << count) - 1
    for token in tokens:
        bits &= ~(1 << token)
    return bits.to_bytes(-(-count // 32) * 4, "little")


class Thoughts:
    """The reasoning before an answer."""

    def __init__(self, begins: int, ends: tuple[int, ...], allowed: bytes, *, begun: bool) -> None:
        """They begin with a token, if the prompt has not `begun` them, and end with the tokens that the answer proper
        follows. `allowed` is the mask until then."""
        self.begins, self._ends = begins, ends
        self.allowed, self.begun, self.over = allowed, begun, False
        self._last = tuple[int, ...]()

    def take(self, token: int) -> bool:
        """Whether it is one of theirs."""
        self.begun = self.begun or token == self.begins
        self._last = (*self._last, token)[-len(self._ends) :]
        self.over = self._last == self._ends
        return self.begun


class GrammarGuide:
    """One row's. The engine thread's own, but for `broken`: llguidance raises where two threads meet in a matcher."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], thoughts: Thoughts | None = None) -> None:
        """`ends` are the tokens that end a sequence."""
        self._matcher, self._ends, self._thoughts = matcher, ends, thoughts
        self._broken: str | None = None

    @property
    def broken(self) -> str | None:
        return self._broken

    def accept(self, token: int) -> None:
        if token in self._ends:  # a batch computes a step more than its rows need
            return
        if self._thoughts and self._thoughts.take(token):
            self._thoughts = None if self._thoughts.over else self._thoughts
            return
        self._thoughts = None
        self._matcher.consume_token(token)
        self._look()

    def allowed(self) -> bytes:
        thoughts = self._thoughts
        if thoughts and thoughts.begun:
            return thoughts.allowed
        mask = self._matcher.compute_bitmask()
        self._look()
        return _with(mask, thoughts.begins) if thoughts else mask

    def _look(self) -> None:
        self._broken = self._broken or error_of(self._matcher)


def _with(mask: bytes, token: int) -> bytes:
    place = token // 8
    return mask[:place] + bytes([mask[place] | 1 << token % 8]) + mask[place + 1 :]
