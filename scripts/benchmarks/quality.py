"""The effect of SpecPrefill on answers: the tiny model, as its own draft, finds codes in long texts that are only
partly computed.

Each text is answered dense, and with tokens chosen in three ways, which have the same protected tokens and the same
budget and differ only in the scores.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import mlx.nn as nn
from rich.console import Console
from rich.progress import track
from rich.table import Table

from scripts.stack import TINY_CHAT
from scripts.tiny_chat.data import Chat, Message, find_code
from scripts.tiny_chat.evaluate import Answerer
from scripts.tiny_chat.network import trainable
from scripts.tiny_chat.tokenizer import TURN_END
from worker.engine.batch.decode_batch import DecodeBatch
from worker.engine.batch.row import Row
from worker.engine.prefill.scoring import LOOKAHEAD, Draft
from worker.engine.prefill.spans import ComputeSpans
from worker.engine.prefill.task import PromptTask
from worker.schedule.request import GenerationRequest, Range
from worker.schedule.selection import CHUNK, select_ranges

CASES = 300
FILLERS = 100, 180  # sentences, or some 1,000 to 1,800 tokens
DEPTHS = 10  # tenths of the text, used in turn
TAIL = 32  # tokens at the end that are always kept; the question and the template take some 20
ANSWER = 20  # tokens; a correct answer has 16
KEEPS = 0.1, 0.2, 0.3, 0.5, 0.7, 1.0

MIN_DENSE = 0.9  # share of correct dense answers; with fewer, the model would be measured
LIMITS = {0.1: 0.95, 0.3: 0.99}  # by share kept: correct answers, relative to dense
CHANCE = 0.5  # limit of the other ways for these shares


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and its correct answer."""

    number: int
    prompt: tuple[int, ...]
    protected: tuple[Range, ...]
    answer: str


Scores = Sequence[float]
Key = tuple[str, float]  # the way, and the share to keep


@dataclass(frozen=True, slots=True)
class Outcome:
    """If the answers to one case are correct."""

    dense: bool
    sparse: dict[Key, bool]
    kept: dict[Key, float]  # the actual share


def main(console: Console) -> bool:
    """Run the benchmark, print its table, and return True if every value is within its limit."""
    answerer = Answerer(TINY_CHAT)
    draft = Draft(answerer.network, prefix_bytes=0)
    numbers = track(range(CASES), "texts", console=console, transient=True)
    return report([outcome(case_of(number, answerer), answerer, draft) for number in numbers], console)


# Texts


def case_of(number: int, answerer: Answerer) -> Case:
    """Return the case of this number, always the same."""
    dice = Random(f"specprefill/{number}")
    question, right = at_depth(dice, number % DEPTHS)
    messages = [Message("system", "You are a helpful assistant."), question] if dice.random() < 0.5 else [question]
    prompt, protected = list[int](), list[Range]()
    for text, is_protected in pieces(messages):
        start = len(prompt)
        prompt += answerer.tokenizer.encode(text, add_special_tokens=False)
        protected += [(start, len(prompt))] if is_protected else []
    protected.append((len(prompt) - TAIL, len(prompt)))
    return Case(number, tuple(prompt), tuple(protected), right.text)


def at_depth(dice: Random, tenth: int) -> Chat:
    """Draw a chat whose code is in this tenth of the text."""
    while True:
        question, right = find_code(dice, dice.randint(*FILLERS))
        if question.text.index(right.text) * DEPTHS // len(question.text) == tenth:
            return [question, right]


def pieces(messages: Iterable[Message]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of the prompt as the chat template joins them, each with True if it is protected."""
    for role, text in messages:
        yield from [(f"<|im_start|>{role}\n", True), (text, role == "system"), ("<|im_end|>\n", True)]
    yield "<|im_start|>assistant\n", True


# Ways to choose


def by_scores(case: Case, draft: Draft) -> Scores:
    """Return the scores of the draft model."""
    scoring = draft.scoring("", case.prompt)
    with trainable():  # several times faster for a whole prompt, but not for single tokens
        scoring.advance(scoring.remaining - LOOKAHEAD)
    for _ in range(LOOKAHEAD):
        scoring.advance(1)
    assert scoring.scores is not None, "scoring is complete"
    return scoring.scores


def at_random(case: Case, draft: Draft) -> Scores:
    """Return random scores."""
    dice = Random(case.number)
    return [dice.random() for _ in case.prompt]


def evenly(case: Case, draft: Draft) -> Scores:
    """Return multiples of the golden ratio, modulo 1: any number of best chunks is spread evenly."""
    return [at // CHUNK * 0.6180339887 % 1 for at in range(len(case.prompt))]


WAYS: dict[str, Callable[[Case, Draft], Scores]] = {
    "by scores": by_scores,
    "at random": at_random,
    "evenly spread": evenly,
}


# Answers


def outcome(case: Case, answerer: Answerer, draft: Draft) -> Outcome:
    """Answer one case dense and in all ways."""
    chosen = dict[Key, tuple[Range, ...]]()
    for way, scores_of in WAYS.items():
        scores = scores_of(case, draft)
        chosen |= {(way, keep): tuple(select_ranges(scores, keep, case.protected)) for keep in KEEPS}
    network, question = answerer.network, GenerationRequest(str(case.number), case.prompt, ANSWER)
    dense = task_of(network, question)
    sparse = {
        kept: task_of(network, replace(question, kept_ranges=kept))
        for kept in dict.fromkeys(chosen.values())  # 100 % are the same tokens in each way
    }
    decode(answerer, [dense, *sparse.values()])
    return Outcome(
        dense=is_right(dense.row, case, answerer),
        sparse={key: is_right(sparse[kept].row, case, answerer) for key, kept in chosen.items()},
        kept={key: sum(end - start for start, end in kept) / len(case.prompt) for key, kept in chosen.items()},
    )


def task_of(network: nn.Module, request: GenerationRequest) -> PromptTask:
    """Return the computation of a prompt."""
    return PromptTask(Row.of(request), ComputeSpans(network, request))


def decode(answerer: Answerer, prompts: Sequence[PromptTask]) -> None:
    """Decode all rows greedily, in one batch."""
    rows = DecodeBatch(answerer.network)
    for prompt in prompts:
        with trainable():
            prompt.advance(prompt.stage.remaining)
        rows.add([prompt.finish().joining])
    for _ in range(1 + ANSWER):  # the first step computes the last token of the prompt
        rows.launch()
        for outcome in rows.collect():
            outcome.row.answer.append(outcome.token)


def is_right(row: Row, case: Case, answerer: Answerer) -> bool:
    """Return True if a row's answer is correct."""
    tokens = row.answer[: row.answer.index(TURN_END)] if TURN_END in row.answer else row.answer
    return bool(answerer.tokenizer.decode(tokens) == case.answer)


# Bars


def report(outcomes: Sequence[Outcome], console: Console) -> bool:
    """Print the table, and return True if all values are within their limits."""
    dense = sum(each.dense for each in outcomes)
    title = f"{len(outcomes)} codes in texts, correct dense: {dense}"
    table = Table("to keep", "kept", *WAYS, "lost", "limit", "holds", title=title, title_justify="left")
    holds = dense >= MIN_DENSE * len(outcomes)
    for keep in KEEPS:
        right = {way: sum(each.sparse[way, keep] for each in outcomes) for way in WAYS}
        lost = sum(each.dense and not each.sparse["by scores", keep] for each in outcomes)
        kept = sum(each.kept["by scores", keep] for each in outcomes) / len(outcomes)
        limit, within = check_share(keep, right, dense)
        holds = holds and within is not False
        counts = [f"{count} ({count / dense:.1%})" for count in right.values()]
        table.add_row(f"{keep:.0%}", f"{kept:.1%}", *counts, str(lost), limit, HELD[within])
    console.print(table)
    return holds


HELD = {True: "[green]yes", False: "[red]no", None: ""}


def check_share(keep: float, right: dict[str, int], dense: int) -> tuple[str, bool | None]:
    """Return the limit for this share, and if it is met; None if there is no limit."""
    if keep == 1:
        return "= dense", set(right.values()) == {dense}
    if keep not in LIMITS:
        return "", None
    ours, *others = right.values()
    within = ours >= LIMITS[keep] * dense and max(others) <= CHANCE * dense
    return f"≥ {LIMITS[keep]:.0%}, others ≤ {CHANCE:.0%}", within
