"""Thoughts that are closed by their budget: the answer is what the model says after the same tokens."""

import json
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest

from tests.engine.driver import Run
from tests.engine.speculation.oracle import Oracle, speculator_of, verify_everything
from tests.engine.tiny import CONFIGS, EOS, VOCAB, alone, model, network, prompt
from worker.engine.tokenizer import MLXTokenizer
from worker.request import GrammarState, Sampling
from worker.text.grammar.lark import Grammar
from worker.text.grammar.llg_tokenizer import llguidance_tokenizer
from worker.text.grammar.row.grammar import RowGrammar
from worker.text.grammar.row.thought import ThoughtLimit, ThoughtMask, ThoughtState
from worker.text.grammar.sandbox import compile_grammar
from worker.text.output.thought import Closing, Thought, ThoughtFormat
from worker.text.tokenizer import Vocabulary

WORDS = MLXTokenizer(model("qwen3").tokenizer)
BYTES = Vocabulary(WORDS)
END, LINE = WORDS.encode("</think>"), WORDS.encode("\n")
CLOSING = Closing((*LINE,), (*END, *LINE, *LINE))
FORM = ThoughtFormat(b"<think>", b"</think>", 1, BYTES.bytes_of, (CLOSING,))
LENGTH = 24
SEEDED = Sampling(temperature=1.0, top_p=0.95, seed=5)


def limit(budget: int, grammar: GrammarState | None = None) -> ThoughtLimit:
    def thought() -> Thought:
        return Thought(FORM, begun=True, only_first=grammar is not None, budget=budget)

    return ThoughtLimit(thought, grammar, VOCAB)


def closed(free: Sequence[int], budget: int) -> list[int]:
    """Return the beginning of a free answer up to the budget, and the closing that must follow."""
    for end in range(budget, len(free)):
        before = b"".join(map(BYTES.bytes_of, free[:end]))
        if b"</think>" in before:
            return []
        decoder = getincrementaldecoder("utf-8")("replace")
        decoder.decode(before)
        if not decoder.getstate()[0]:  # no character is cut
            spaces = () if before.endswith(b"\n") else CLOSING.before
            return [*free[:end], *spaces, *CLOSING.after]
    return []


@pytest.mark.parametrize("family", CONFIGS)
def test_at_every_budget_the_answer_is_the_model_s_own_after_the_same_tokens(family: str) -> None:
    start = prompt(17, 3)
    free, run = alone(network(family), start, LENGTH), Run(model(family))
    for budget in range(LENGTH):
        run.add(str(budget), start, max_tokens=LENGTH, grammar=limit(budget))
    run.drain()
    tried = 0
    for budget in range(LENGTH - 6):
        if forced := closed(free, budget):
            tried += 1
            after = alone(network(family), (*start, *forced), LENGTH - len(forced)) if len(forced) < LENGTH else []
            assert run.generated[str(budget)] == [*forced, *after][:LENGTH]
    assert tried > 0


@pytest.mark.parametrize("family", CONFIGS)
def test_a_seeded_answer_goes_on_with_the_draws_of_one_without_a_budget(family: str) -> None:
    start, run = prompt(9, 4), Run(model(family))
    run.add("free", start, max_tokens=LENGTH, sampling=SEEDED)
    for budget in range(12):
        run.add(str(budget), start, max_tokens=LENGTH, sampling=SEEDED, grammar=limit(budget))
    run.drain()
    oracle = Run(model(family))
    known = {str(budget): closed(run.generated["free"], budget) for budget in range(12)}
    for id, forced in known.items():
        if forced:
            oracle.add(id, start, max_tokens=LENGTH, sampling=SEEDED, resume_tokens=forced)
    assert oracle.drain() == {id: run.generated[id] for id, forced in known.items() if forced}
    assert any(known.values())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3", "mamba2"])
def test_a_row_that_is_preempted_loses_its_cache_or_resumes_closes_at_the_same_place(family: str) -> None:
    start = prompt(11, 6)
    without = Run(model(family))
    without.add("row", start, max_tokens=LENGTH, sampling=SEEDED, grammar=limit(7))
    whole = without.drain()["row"]
    for steps in range(2, 16):
        run = Run(model(family))
        run.add("row", start, max_tokens=LENGTH, sampling=SEEDED, grammar=limit(7))
        for _ in range(steps):
            run.step()
        run.engine._lose_decoding()
        assert run.drain()["row"] == whole
    for place in range(1, 14):
        run = Run(model(family))
        run.add("row", start, max_tokens=LENGTH, sampling=SEEDED, grammar=limit(7), resume_tokens=whole[:place])
        assert run.drain()["row"] == whole


@pytest.mark.parametrize("family", CONFIGS)
def test_each_choice_of_one_prompt_is_closed_as_it_is_alone(family: str) -> None:
    start, run = prompt(40, 8), Run(model(family), prefix_bytes=10**9)
    choices = {str(seed): replace(SEEDED, seed=seed) for seed in range(6)}
    for id, sampling in choices.items():
        run.add(id, start, max_tokens=LENGTH, sampling=sampling, grammar=limit(5), boundaries=[32])
        if int(id) % 2:  # two begin together, and the next while they are within their thoughts
            for _ in range(3):
                run.step()
    run.drain()
    for id, sampling in choices.items():
        alone_ = Run(model(family))
        alone_.add(id, start, max_tokens=LENGTH, sampling=sampling, grammar=limit(5))
        assert alone_.drain()[id] == run.generated[id]
    assert len({*map(tuple, run.generated.values())}) == len(choices)
    assert any(run.cached.values())  # what the first have computed of the prompt


@pytest.mark.parametrize("how", ["whole", "preempted", "resumed", "drafted"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_turn_after_a_closed_thought_reads_it_from_the_prefix_cache(
    family: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify_everything(monkeypatch)
    start, budget = prompt(21, 9), 6
    first = Run(model(family))
    first.add("turn", start, max_tokens=LENGTH, sampling=SEEDED, grammar=limit(budget))
    said = tuple(first.drain()["turn"])
    again = (*start, *said, *prompt(9, 2))
    first.add("next", again, max_tokens=LENGTH, sampling=SEEDED, grammar=limit(budget))
    first.drain()

    oracle = Oracle({"turn": said, "next": first.generated["next"]})
    speculator = speculator_of(model(family), oracle) if how == "drafted" else None
    run = Run(model(family), prefix_bytes=10**9, speculator=speculator)
    resumed = said[: budget + 2] if how == "resumed" else ()  # within the tokens that close the thought
    run.add("turn", start, max_tokens=LENGTH, sampling=SEEDED, grammar=limit(budget), resume_tokens=resumed)
    if how == "preempted":
        run.until(lambda: len(run.generated["turn"]) > budget)
        run.preempt("turn")
        run.spill()
        run.readmit()
    run.drain()
    run.add("next", again, max_tokens=LENGTH, sampling=SEEDED, grammar=limit(budget))
    run.drain()
    assert run.generated == first.generated
    assert run.cached["next"] > len(start) + budget + len(CLOSING.after)
    assert oracle.accepted > 0 or how != "drafted"


@cache
def guided() -> Callable[[], RowGrammar]:
    words = llguidance_tokenizer(WORDS, BYTES, VOCAB)
    assert words is not None
    grammar = Grammar({})
    numbers = {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 5}
    text = grammar.starting_with(f"/[ \\n]{{0,4}}/ ({grammar.json(numbers, 'response_format')})")
    mask = ThoughtMask(BYTES, VOCAB, begins=3, ends="</think>", banned=[EOS])

    def new() -> RowGrammar:
        return RowGrammar(
            compile_grammar(words, text),
            frozenset([EOS]),
            ThoughtState(mask, begun=True),
            drafts=compile_grammar(words, text),
        )

    return new


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3"])
def test_under_a_grammar_the_thought_is_closed_and_the_answer_is_what_the_grammar_allows(family: str) -> None:
    run = Run(model(family))
    for budget in range(8):
        run.add(str(budget), prompt(8, budget), max_tokens=120, sampling=SEEDED, grammar=limit(budget, guided()()))
    run.drain()
    for budget in range(8):
        text = b"".join(map(BYTES.bytes_of, run.generated[str(budget)])).decode(errors="replace")
        thought, marker, answer = text.partition("</think>")
        assert marker
        assert len(WORDS.encode(thought)) <= 5 * (budget + 4)
        if run.ended[str(budget)] == "stop":
            assert isinstance(json.loads(answer), list)
        else:
            assert answer.startswith("\n\n[")


@pytest.mark.parametrize("is_guided", [False, True], ids=["free", "guided"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3"])
def test_drafts_change_nothing_in_rows_with_a_budget(
    family: str, is_guided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify_everything(monkeypatch)

    def drive(run: Run) -> None:
        for budget in range(10):
            grammar = limit(budget, guided()() if is_guided else None)
            sampling = SEEDED if budget % 2 else Sampling()
            run.add(str(budget), prompt(5 + budget, budget), max_tokens=LENGTH, sampling=sampling, grammar=grammar)
            run.step()
        run.drain()

    plain = Run(model(family))
    drive(plain)
    oracle = Oracle(plain.generated)
    drafted = Run(model(family), speculator=speculator_of(model(family), oracle))
    drive(drafted)
    assert (drafted.generated, drafted.ended) == (plain.generated, plain.ended)
    assert oracle.accepted > 0
