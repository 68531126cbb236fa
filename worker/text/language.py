"""The model's language: how it takes a conversation and what its tokens mean. A worker has one."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from schemas import ChatRequest
from schemas.keys import Lane
from worker.schedule.sequence import Guide, Logprobs
from worker.text.boundaries import Boundaries
from worker.text.detokenize import Vocabulary
from worker.text.dialect import Dialect
from worker.text.guide import Guides
from worker.text.logprobs import entry
from worker.text.output import Output
from worker.text.places import Places
from worker.text.prompt import Prompt, Prompts
from worker.text.quoting import Quoting
from worker.text.thinnable import Thinnable
from worker.text.threads import Check, TextThreads
from worker.text.tokenizer import Tokenizer

T = TypeVar("T")


class Language:
    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab: int,
        *,
        boundaries: bool = False,
        thinnable: bool = False,
        control_tokens: bool = False,
        context: int | None = None,
    ) -> None:
        """`vocab` is the width of the network's logits, which may be more than the tokenizer has tokens.
        `context`: tokens; a prompt well beyond it is refused before it is tokenized.
        `boundaries` and `thinnable`: whether prompts come with theirs. A model whose prefixes end anywhere has no use
        for the one, and one without a draft none for the other. `control_tokens`: whether a client's text may hold
        some; else they are text there."""
        self._vocabulary, self._dialect = Vocabulary(tokenizer), Dialect(tokenizer)
        places = Places(self._vocabulary, len(tokenizer.tokens)) if boundaries or thinnable else None
        self._threads = TextThreads()
        self._prompts = Prompts(
            tokenizer,
            self._dialect.think,
            Boundaries(places) if places and boundaries else None,
            Thinnable(places) if places and thinnable else None,
            None if control_tokens else _quoting(tokenizer, self._dialect),
            context=context,
            threads=self._threads,
        )
        self._guides = Guides(tokenizer, self._vocabulary, self._dialect, vocab)

    async def prompt(self, request: ChatRequest, images: Sequence[str] = (), lane: Lane = "interactive") -> Prompt:
        """`images`: what the model reads for each image of the messages, in order. Raises `Refusal` with the template's
        own words."""
        return await self._prompts.render(request, images, lane)

    async def guide(self, request: ChatRequest, prompt: Prompt, lane: Lane = "interactive") -> Guide | None:
        """None where the answer may be anything. Raises `Refusal` for a schema that cannot be held."""
        return await self._guides.guide(request, prompt, lane)

    async def run(self, lane: Lane, characters: int, work: Callable[[Check], T], tenant: str = "") -> T:
        """Call `work`, which is on so many characters, on a thread for texts: see `Pool.run`."""
        return await self._threads.run(lane, characters, work, tenant)

    def output(self, request: ChatRequest, prompt: Prompt, job_id: str) -> Output:
        return Output(self._vocabulary, self._dialect, request, prompt.thinking, job_id)

    def logprobs(self, token: int, sampled: Logprobs) -> dict[str, Any]:
        """OpenAI's entry for a token."""
        return entry(token, sampled, self._vocabulary.bytes_of)


def _quoting(tokenizer: Tokenizer, dialect: Dialect) -> Quoting:
    own = () if dialect.harmony else (*(dialect.think or ()), *(tokenizer.tool or ()))  # gpt-oss's end turns
    return Quoting(tokenizer.control_tokens, own)
