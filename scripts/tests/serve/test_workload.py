"""Chats and arrivals by seed."""

from itertools import pairwise
from random import Random
from statistics import fmean, median

import pytest

from scripts.benchmarks.serve import workload
from scripts.benchmarks.serve.workload import ANSWER_TOKENS, PROMPT_WORDS, Chat, LogNormal, Mix, arrivals


def first_words(chats: list[Chat]) -> list[str]:
    return [chat.turns[0].text.split()[0] for chat in chats]


def test_no_two_unseen_prompts_begin_with_the_same_word() -> None:
    chats = Mix().open(rate=20, seconds=40, dice=Random(0)) + workload.burst(32, 8, Random(1))
    assert len(set(first_words(chats))) == len(chats) == 832


def test_returning_prompts_are_all_among_those_that_were_sent_before() -> None:
    mix = Mix(returning=5)
    texts = {chat.turns[0].text for chat in mix.open(rate=2, seconds=40, dice=Random(3))}
    assert texts == {*mix.pool()}
    assert len(texts) == 5


def test_an_equal_seed_gives_equal_chats_and_another_gives_others() -> None:
    first, second, other = (Mix(tenants=3).open(3, 20, Random(seed)) for seed in (1, 1, 2))
    assert first == second != other


def test_a_rate_fixes_the_number_of_arrivals_and_the_seed_their_times() -> None:
    times = arrivals(2.5, 40, Random(0))
    assert len(times) == 100
    assert times == sorted(times) != arrivals(2.5, 40, Random(1))
    assert 0 <= times[0] < times[-1] <= 40


def test_gaps_between_arrivals_vary_as_those_of_a_poisson_process() -> None:
    times = arrivals(10, 1000, Random(0))
    gaps = [after - before for before, after in pairwise(times)]
    assert fmean(gap > 0.1 for gap in gaps) == pytest.approx(0.368, abs=0.02)  # 1/e, of an exponential distribution


@pytest.mark.parametrize("lengths", [PROMPT_WORDS, ANSWER_TOKENS])
def test_lengths_have_the_median_and_the_bounds_of_their_distribution(lengths: LogNormal) -> None:
    drawn = lengths.draw(2000, Random(0))
    assert median(drawn) == pytest.approx(lengths.median, rel=0.03)
    assert (min(drawn), max(drawn)) == (lengths.least, lengths.most)


def test_few_lengths_have_about_the_same_mean_for_every_seed() -> None:
    means = [fmean(PROMPT_WORDS.draw(40, Random(seed))) for seed in range(10)]
    assert all(mean == pytest.approx(PROMPT_WORDS.mean, rel=0.15) for mean in means)


def test_turns_of_a_conversation_follow_after_a_pause() -> None:
    chats = Mix().conversations(rate=1, seconds=30, think_s=3, dice=Random(0))
    later = [turn for chat in chats for turn in chat.turns[1:]]
    assert len(chats) == 30
    assert all(turn.think_s > 0 for turn in later)
    assert [chat.turns[0].think_s for chat in chats] == [0.0] * 30
    assert median(turn.think_s for turn in later) == pytest.approx(3, rel=0.4)


@pytest.mark.parametrize("count", [4, 8])
def test_agents_share_a_system_prompt_and_tools_that_no_other_run_has(count: int) -> None:
    chats, others = (workload.agents(count, Random(seed)) for seed in (0, 1))
    assert len(chats) == count
    assert {(chat.system, repr(chat.tools), len(chat.turns)) for chat in chats} == {
        (chats[0].system, repr(chats[0].tools), 6)
    }
    assert chats[0].system.split()[0] != others[0].system.split()[0]
    assert [tool["function"]["description"].split()[0] for tool in chats[0].tools] != [
        tool["function"]["description"].split()[0] for tool in others[0].tools
    ]
    assert len({turn.text.split()[0] for chat in chats for turn in chat.turns}) == 6 * count


def test_an_agents_turns_have_100_to_300_words_and_as_many_in_all_for_each_seed_and_with_reminders() -> None:
    def words(chat: Chat) -> list[int]:
        return [len(f"{turn.text} {turn.reminder}".split()) for turn in chat.turns]

    runs = [workload.agents(4, Random(0)), workload.agents(4, Random(1)), workload.agents(4, Random(2), reminders=True)]
    lengths = [sorted(number for chat in chats for number in words(chat)) for chats in runs]
    assert lengths[0] == lengths[1] == [number + workload.REMINDER_MARK_WORDS for number in lengths[2]]
    assert (lengths[0][0], lengths[0][-1]) == (100, 300)
    assert all(len(turn.reminder.split()) == workload.REMINDER_WORDS for chat in runs[2] for turn in chat.turns)
