"""SpecPrefill as a job sees it: whether its prompt may be thinned, and the receipt of what was done."""

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from schemas import ChatRequest
from schemas.chat import JsonObjectFormat, JsonSchemaFormat
from schemas.messages import TextPart
from worker.schedule.sequence import Range, Thinned, Thinning, Whole, tokens_in
from worker.settings import Settings
from worker.text.prompt import Prompt

_MOSTLY_CODE = 0.5  # share of the conversation's text that stands in fences: an edit needs every line


@dataclass(slots=True)
class Receipt:
    """What of a prompt was computed, and why. Empty where nobody asked and the prompt is of ordinary length."""

    draft: str = ""
    why_whole: str = ""
    kept: tuple[Range, ...] | None = None
    scoring_s: float = 0.0

    @property
    def kept_tokens(self) -> int | None:
        return None if self.kept is None else tokens_in(self.kept)

    def saw(self, outcome: Thinned | Whole) -> None:
        match outcome:
            case Thinned(kept=kept, seconds=seconds):
                self.kept, self.scoring_s = kept, seconds
            case Whole(why=why):
                self.kept, self.why_whole = None, why

    def told(self, prompt_tokens: int, prefill_s: float) -> dict[str, Any] | None:
        """In the stored result. `prefill_s`: all of it, the scoring too."""
        if self.kept_tokens is not None:
            times = {"scoring_s": round(self.scoring_s, 6), "prefill_s": round(max(0.0, prefill_s - self.scoring_s), 6)}
            return {"kept": round(self.kept_tokens / prompt_tokens, 4), "draft": self.draft, **times}
        return {"skipped": self.why_whole} if self.why_whole else None


def thinning_of(request: ChatRequest, prompt: Prompt, settings: Settings) -> tuple[Thinning | None, Receipt]:
    """By the worker's rule, or the request's own wish."""
    if settings.specprefill_draft_model is None or request.specprefill is False:
        return None, Receipt()
    receipt = Receipt(PurePath(settings.specprefill_draft_model).name)
    asked, tokens = request.specprefill or False, len(prompt.tokens)
    if not asked and tokens < settings.specprefill_threshold:
        return None, receipt
    receipt.why_whole = _why_whole(request, prompt, settings, asked=asked)
    if receipt.why_whole:
        return None, receipt
    keep = request.specprefill_keep_pct or settings.specprefill_keep_pct
    return Thinning(keep, prompt.thinnable, 1 if asked else settings.specprefill_threshold, asked), receipt


def _why_whole(request: ChatRequest, prompt: Prompt, settings: Settings, *, asked: bool) -> str:
    most = settings.specprefill_max_tokens
    if len(prompt.tokens) > most:
        return f"The prompt has {len(prompt.tokens):,} tokens, and scoring ends at {most:,}."
    if not prompt.thinnable:
        return "The prompt has no long text of which tokens could be left out."
    if asked:
        return ""
    if request.offered_tools:
        return "The request offers tools; `specprefill: true` asks for it."
    if isinstance(request.response_format, JsonObjectFormat | JsonSchemaFormat):
        return "The request asks for JSON; `specprefill: true` asks for it."
    if _code_share(request) > _MOSTLY_CODE:
        return "The prompt is mostly code; `specprefill: true` asks for it."
    return ""


def _code_share(request: ChatRequest) -> float:
    """Of the conversation's text, within fences."""
    texts = [text for message in request.messages for text in _texts(message.content)]
    code = sum(len(piece) for text in texts for piece in text.split("```")[1::2])
    return code / max(1, sum(map(len, texts)))


def _texts(content: str | list[Any] | None) -> list[str]:
    if isinstance(content, list):
        return [part.text for part in content if isinstance(part, TextPart)]
    return [content or ""]


# Between the attempts at a job


def stored(receipt: Receipt, fingerprint: str) -> str:
    """For the job's hash: a new attempt leaves out the same tokens, or it would not go on as the old one did."""
    return json.dumps({"fingerprint": fingerprint, **asdict(receipt)}, separators=(",", ":"))


def recalled(told: bytes, fingerprint: str, prompt_tokens: int) -> Receipt | None:
    """None where nothing was decided, or with another model, or what is there is not what we wrote."""
    try:
        earlier = json.loads(told or b"{}")
        if earlier.pop("fingerprint", None) != fingerprint:
            return None
        kept = earlier.pop("kept")
        ranges = None if kept is None else tuple((int(start), int(end)) for start, end in kept)
        return Receipt(**earlier, kept=ranges) if ranges is None or _fit(ranges, prompt_tokens) else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _fit(ranges: tuple[Range, ...], prompt_tokens: int) -> bool:
    """In order, apart from each other, and to the end of the prompt."""
    edges = [edge for span in ranges for edge in span]
    return all(one < other for one, other in pairwise([-1, *edges])) and edges[-1:] == [prompt_tokens]
