"""What SpecPrefill costs in answers: the tiny model, its own draft, finds codes in long texts of which it computes a
part.

Each text is answered dense, and with tokens chosen in three ways. All three have the same protected tokens and the same
budget, and differ in nothing but the scores.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

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
from worker.engine.prefill.base import Prefill
from worker.engine.prefill.scoring import LOOKAHEAD, Draft
from worker.engine.prefill.sparse import SparsePrefill
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.schedule.request import GenerationRequest as Asked
from worker.schedule.request import Range
from worker.schedule.selection import CHUNK, select_ranges

CASES = 300
FILLERS = 100, 180  # sentences, which make some 1,000 to 1,800 tokens
DEPTHS = 10  # tenths of the text; the cases go through them in turn
TAIL = 32  # tokens at the end that stay whatever they score; the question and the template take some 20
ANSWER = 20  # tokens; a right one has 16
KEEPS = 0.1, 0.2, 0.3, 0.5, 0.7, 1.0

LEAST_DENSE = 0.9  # right, of all texts: longer ones would measure the model
BARS = {0.1: 0.95, 0.3: 0.99}  # right with so much kept, as a share of those right dense
CHANCE = 0.5  # with so much kept, the other ways come to no more


@dataclass(frozen=True, slots=True)
class Case:
    number: int
    prompt: tuple[int, ...]
    protected: tuple[Range, ...]
    answer: str


Scores = Sequence[float]
Key = tuple[str, float]  # the way, and the share that was to be kept


@dataclass(frozen=True, slots=True)
class Outcome:
    dense: bool  # right
    thinned: dict[Key, bool]
    kept: dict[Key, float]  # the share that was


def main(console: Console) -> bool:
    answerer = Answerer(TINY_CHAT)
    draft = Draft(answerer.network, prefix_bytes=0)
    numbers = track(range(CASES), "texts", console=console, transient=True)
    return report([outcome(case_of(number, answerer), answerer, draft) for number in numbers], console)


# Texts


def case_of(number: int, answerer: Answerer) -> Case:
    dice = Random(f"specprefill/{number}")
    asked, right = at_depth(dice, number % DEPTHS)
    messages = [Message("system", "You are a helpful assistant."), asked] if dice.random() < 0.5 else [asked]
    prompt, protected = list[int](), list[Range]()
    for text, stays in pieces(messages):
        start = len(prompt)
        prompt += answerer.tokenizer.encode(text, add_special_tokens=False)
        protected += [(start, len(prompt))] if stays else []
    protected.append((len(prompt) - TAIL, len(prompt)))
    return Case(number, tuple(prompt), tuple(protected), right.text)


def at_depth(dice: Random, tenth: int) -> Chat:
    while True:
        asked, right = find_code(dice, dice.randint(*FILLERS))
        if asked.text.index(right.text) * DEPTHS // len(asked.text) == tenth:
            return [asked, right]


def pieces(messages: Iterable[Message]) -> Iterator[tuple[str, bool]]:
    """As the chat template puts them together, and whether each stays whatever it scores."""
    for role, text in messages:
        yield from [(f"<|im_start|>{role}\n", True), (text, role == "system"), ("<|im_end|>\n", True)]
    yield "<|im_start|>assistant\n", True


# Ways to choose


def by_scores(case: Case, draft: Draft) -> Scores:
    scoring = draft.scoring("", case.prompt)
    with trainable():  # a prompt at once is several times faster; what follows comes token by token
        scoring.advance(scoring.remaining - LOOKAHEAD)
    for _ in range(LOOKAHEAD):
        scoring.advance(1)
    assert scoring.scores is not None, "nothing remains"
    return scoring.scores


def at_random(case: Case, draft: Draft) -> Scores:
    dice = Random(case.number)
    return [dice.random() for _ in case.prompt]


def evenly(case: Case, draft: Draft) -> Scores:
    """Multiples of the golden section: of however many chunks the first are taken, they are spread."""
    return [at // CHUNK * 0.6180339887 % 1 for at in range(len(case.prompt))]


WAYS: dict[str, Callable[[Case, Draft], Scores]] = {
    "by scores": by_scores,
    "at random": at_random,
    "evenly spread": evenly,
}


# Answers


def outcome(case: Case, answerer: Answerer, draft: Draft) -> Outcome:
    chosen = dict[Key, tuple[Range, ...]]()
    for way, scores_of in WAYS.items():
        scores = scores_of(case, draft)
        chosen |= {(way, keep): tuple(select_ranges(scores, keep, case.protected)) for keep in KEEPS}
    network, asked = answerer.network, Asked(str(case.number), case.prompt, ANSWER)
    dense = Prefill(network, Row.of(asked))
    thinned = {
        kept: SparsePrefill(network, Row.of(asked), kept, make_prompt_cache(network), 0)
        for kept in dict.fromkeys(chosen.values())  # a hundred percent are the same tokens in each way
    }
    decode(answerer, [dense, *thinned.values()])
    return Outcome(
        dense=is_right(dense.row, case, answerer),
        thinned={key: is_right(thinned[kept].row, case, answerer) for key, kept in chosen.items()},
        kept={key: sum(end - start for start, end in kept) / len(case.prompt) for key, kept in chosen.items()},
    )


def decode(answerer: Answerer, prefills: Sequence[Prefill | SparsePrefill]) -> None:
    """Greedily, all rows together."""
    rows = DecodeBatch(answerer.network)
    for prefill in prefills:
        with trainable():
            prefill.advance(prefill.remaining)
        rows.add(prefill.row, *prefill.finish())
    for _ in range(1 + ANSWER):  # the first of them feeds the prompt's last token
        rows.launch()
        for told in rows.collect():
            told.row.answer.append(told.token)


def is_right(row: Row, case: Case, answerer: Answerer) -> bool:
    said = row.answer[: row.answer.index(TURN_END)] if TURN_END in row.answer else row.answer
    return bool(answerer.tokenizer.decode(said) == case.answer)


# Bars


def report(outcomes: Sequence[Outcome], console: Console) -> bool:
    dense = sum(each.dense for each in outcomes)
    title = f"{len(outcomes)} codes in texts, right dense: {dense}"
    table = Table("kept", "in truth", *WAYS, "lost", "bar", "holds", title=title, title_justify="left")
    holds = dense >= LEAST_DENSE * len(outcomes)
    for keep in KEEPS:
        right = {way: sum(each.thinned[way, keep] for each in outcomes) for way in WAYS}
        lost = sum(each.dense and not each.thinned["by scores", keep] for each in outcomes)
        kept = sum(each.kept["by scores", keep] for each in outcomes) / len(outcomes)
        bar, held = judged(keep, right, dense)
        holds = holds and held is not False
        counts = [f"{count} ({count / dense:.1%})" for count in right.values()]
        table.add_row(f"{keep:.0%}", f"{kept:.1%}", *counts, str(lost), bar, HELD[held])
    console.print(table)
    return holds


HELD = {True: "[green]yes", False: "[red]no", None: ""}


def judged(keep: float, right: dict[str, int], dense: int) -> tuple[str, bool | None]:
    if keep == 1:
        return "= dense", set(right.values()) == {dense}
    if keep not in BARS:
        return "", None
    ours, *others = right.values()
    held = ours >= BARS[keep] * dense and max(others) <= CHANCE * dense
    return f"≥ {BARS[keep]:.0%}, others ≤ {CHANCE:.0%}", held
