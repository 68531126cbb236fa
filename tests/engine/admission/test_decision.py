"""Admission by predicted memory. A row of 1,000 tokens takes `cost(1000)` bytes, and nothing here computes."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.contract.keys import Lane
from tests.engine.admission.plain_admission import plainly_in_turn
from worker.engine.admission.decision import (
    Admission,
    AdmissionLimits,
    Admit,
    Decision,
    Refuse,
    RowEstimate,
    Wait,
    admit_in_turn,
    group_lengths,
)
from worker.engine.admission.tuning import MAX_OVERTAKES
from worker.engine.memory import MAX_ROWS, NO_IMAGES, EncoderCost, ImageDemand, KVLayers, MemoryModel

COSTS = MemoryModel(weights_bytes=1_000_000_000, kv_layers=(KVLayers(token_bytes=100_000, layer_bytes=3_000),))


def row(id: str, tokens: int = 1000, lane: Lane = "interactive", *, group: int = 0, passed: int = 0) -> RowEstimate:
    return RowEstimate(id, lane, tokens - 100, 100, group, passed)


def room_for(*rows: RowEstimate) -> int:
    return COSTS.peak_bytes(group_lengths(rows))


def admit(
    candidate: RowEstimate,
    running: list[RowEstimate],
    costs: MemoryModel,
    limit: int,
    held_bytes: int = 0,
    max_rows: int = MAX_ROWS,
) -> Decision:
    """`held_bytes`: of other rows."""
    admission = Admission(running, AdmissionLimits(costs, limit, max_rows))
    admission.set_held_bytes(held_bytes + candidate.held_bytes)
    return admission.decide(candidate)


lanes: list[Lane] = ["interactive", "batch"]
rows = st.lists(st.tuples(st.integers(101, 30_000), st.sampled_from(lanes), st.integers(0, 2)), max_size=8).map(
    lambda given: [row(str(i), tokens, lane, group=group) for i, (tokens, lane, group) in enumerate(given)]
)
limits = st.integers(1_000_000_000, 20_000_000_000)


def admitted(decisions: list[tuple[RowEstimate, Decision]]) -> list[RowEstimate]:
    return [row for row, decision in decisions if isinstance(decision, Admit)]


def test_row_that_fits_is_admitted() -> None:
    here, new = row("here"), row("new")
    assert admit(new, [here], COSTS, room_for(here, new)) == Admit()


def test_row_that_does_not_fit_with_the_others_waits() -> None:
    here, new = row("here"), row("new")
    assert admit(new, [here], COSTS, room_for(here, new) - 1) == Wait()


def test_row_that_does_not_fit_alone_is_refused_with_the_numbers() -> None:
    new = RowEstimate("new", "interactive", 40_000, 1_024)
    assert admit(new, [], COSTS, 3_200_000_000) == Refuse(
        "This request needs 8.4 GB for 40,000 prompt and 1,024 answer tokens; this worker has 2.2 GB for requests: "
        "shorten the prompt or max_tokens by about 31,000 tokens."
    )


def test_refusal_counts_the_tokens_of_the_prompt_without_the_draft_s_cache() -> None:
    long = RowEstimate("new", "interactive", 40_000, 1_024, extra_tokens=10_000)
    refused = admit(long, [], COSTS, 3_200_000_000)
    assert isinstance(refused, Refuse)
    assert " 40,000 prompt and 1,024 answer tokens" in refused.message
    assert refused.message.endswith("shorten the prompt by about 33,000 tokens.")
    shorter = long._replace(prompt_tokens=7_000, extra_tokens=1_750)
    assert admit(shorter, [], COSTS, 3_200_000_000) == Admit()


def test_request_shortened_as_advised_is_not_refused() -> None:
    long = RowEstimate("new", "interactive", 40_000, 1_024)
    assert isinstance(admit(long, [], COSTS, 3_200_000_000), Refuse)
    assert admit(long._replace(prompt_tokens=40_000 - 31_000), [], COSTS, 3_200_000_000) == Admit()


def test_worker_without_memory_refuses_every_request() -> None:
    assert admit(row("new"), [], COSTS, 1_000_100_000) == Refuse(
        "This worker has 100 kB for requests, too little for any answer."
    )


def test_interactive_row_preempts_only_as_many_offline_rows_as_needed() -> None:
    old, young, talk = row("old", 4000, "batch"), row("young", 4000, "batch"), row("talk")
    assert admit(row("new", 4000), [old, young, talk], COSTS, room_for(old, talk, row("new", 4000))) == Admit(
        preempt=("young",)
    )


def test_rows_are_preempted_youngest_first() -> None:
    running = [row("a", 4000, "batch"), row("b", 4000, "batch"), row("c", 4000, "batch")]
    new = row("new", 4000)
    assert admit(new, running, COSTS, room_for(new)) == Admit(preempt=("c", "b", "a"))


def test_interactive_row_preempts_the_youngest_offline_one_at_the_row_limit() -> None:
    running, plenty = [row("a", 400, "batch"), row("talk"), row("b", 400, "batch")], 10**12
    assert admit(row("new"), running, COSTS, plenty, max_rows=4) == Admit()
    assert admit(row("new"), running, COSTS, plenty, max_rows=3) == Admit(preempt=("b",))
    assert admit(row("offline", 400, "batch"), running, COSTS, plenty, max_rows=3) == Wait()
    assert admit(row("new"), [row("talk"), row("more")], COSTS, plenty, max_rows=2) == Wait()


@given(rows, rows, st.integers(1, 8))
def test_no_more_rows_are_admitted_than_the_limit(
    waiting: list[RowEstimate], first: list[RowEstimate], max_rows: int
) -> None:
    plenty = 10**12
    running = admitted(admit_in_turn(first, [], AdmissionLimits(COSTS, plenty, max_rows)))
    renamed = [each._replace(id=f"new {each.id}") for each in waiting]
    decisions = admit_in_turn(renamed, running, AdmissionLimits(COSTS, plenty, max_rows))
    parked = {id for _, decision in decisions if isinstance(decision, Admit) for id in decision.preempt}
    inside = [each for each in [*running, *admitted(decisions)] if each.id not in parked]
    assert len(inside) <= max_rows
    if any(each.lane == "interactive" and decision == Wait() for each, decision in decisions):
        assert all(each.lane == "interactive" for each in inside)


def test_no_row_is_preempted_if_that_does_not_suffice() -> None:
    talk, offline = row("talk", 8000), row("offline", 1000, "batch")
    assert admit(row("new", 8000), [talk, offline], COSTS, room_for(talk)) == Wait()


@given(rows, rows, limits)
def test_admitted_rows_stay_within_memory(waiting: list[RowEstimate], first: list[RowEstimate], limit: int) -> None:
    running = admitted(admit_in_turn(first, [], AdmissionLimits(COSTS, limit)))
    renamed = [each._replace(id=f"new {each.id}") for each in waiting]
    decisions = admit_in_turn(renamed, running, AdmissionLimits(COSTS, limit))
    parked = {id for _, decision in decisions if isinstance(decision, Admit) for id in decision.preempt}
    inside = [each for each in [*running, *admitted(decisions)] if each.id not in parked]
    assert COSTS.peak_bytes(group_lengths(inside)) <= limit


@given(rows, rows, limits)
def test_exactly_the_rows_that_do_not_fit_alone_are_refused(
    waiting: list[RowEstimate], running: list[RowEstimate], limit: int
) -> None:
    for each, decision in admit_in_turn(waiting, running, AdmissionLimits(COSTS, limit)):
        assert isinstance(decision, Refuse) == (room_for(each) > limit)


@given(rows, rows.filter(bool), limits)
def test_only_interactive_rows_preempt_and_only_offline_rows_are_preempted(
    running: list[RowEstimate], waiting: list[RowEstimate], limit: int
) -> None:
    for candidate in waiting:
        decision = admit(candidate._replace(id="new"), running, COSTS, limit)
        if isinstance(decision, Admit) and decision.preempt:
            assert candidate.lane == "interactive"
            assert {each.lane for each in running if each.id in decision.preempt} == {"batch"}


@given(rows, rows.filter(bool), limits, st.integers(0, 10**10))
def test_admitted_row_is_also_admitted_with_more_memory(
    running: list[RowEstimate], waiting: list[RowEstimate], limit: int, more: int
) -> None:
    candidate = waiting[0]._replace(id="new")
    if admit(candidate, running, COSTS, limit) == Admit():
        assert admit(candidate, running, COSTS, limit + more) == Admit()


def test_preempted_row_is_never_refused_and_is_admitted_alone() -> None:
    never, limit = row("never", 4000)._replace(preempted=True), 1_000_100_000
    assert admit(never, [row("here")], COSTS, limit) == Wait()
    assert admit(never, [], COSTS, limit, held_bytes=1) == Wait()
    assert admit(never, [], COSTS, limit) == Admit()


def test_preempted_row_is_not_overtaken_forever() -> None:
    never, small = row("never", 4000, passed=MAX_OVERTAKES)._replace(preempted=True), row("small", 200)
    decisions = admit_in_turn([never, small], [small], AdmissionLimits(COSTS, room_for(small, small)))
    assert decisions == [(never, Wait(overtaken=MAX_OVERTAKES)), (small, Wait())]


def test_saved_caches_of_waiting_rows_count_as_used() -> None:
    new, rest = row("new"), row("rest", 9000)._replace(preempted=True, held_bytes=500)
    limit = room_for(row("here"), new)  # far from enough for the other one
    assert admitted(admit_in_turn([new, rest], [row("here")], AdmissionLimits(COSTS, limit + 499))) == []
    assert admitted(admit_in_turn([new, rest], [row("here")], AdmissionLimits(COSTS, limit + 500))) == [new]


def test_saved_caches_cause_no_refusal() -> None:
    assert admit(row("new"), [], COSTS, room_for(row("new")), held_bytes=10**9) == Wait()


def test_own_saved_cache_does_not_delay_a_row() -> None:
    rest = row("rest")._replace(held_bytes=10**9)
    assert admitted(admit_in_turn([rest, row("new")], [], AdmissionLimits(COSTS, room_for(rest, row("new"))))) == [
        rest,
        row("new"),
    ]


def test_waiting_row_counts_the_rows_that_overtake_it() -> None:
    here, big = row("here", 4000), row("big", 4000, group=1, passed=3)
    small, later = row("small", 200, group=2), row("later", 200, group=2)
    decisions = admit_in_turn([big, small, later], [here], AdmissionLimits(COSTS, room_for(here, small, later)))
    assert decisions == [(big, Wait(overtaken=5)), (small, Admit()), (later, Admit())]


def test_row_overtaken_too_often_is_overtaken_no_more() -> None:
    here, big, small = row("here", 4000), row("big", 4000, group=1, passed=MAX_OVERTAKES), row("small", 200, group=2)
    decisions = admit_in_turn([big, small], [here], AdmissionLimits(COSTS, room_for(here, small)))
    assert decisions == [(big, Wait(overtaken=MAX_OVERTAKES)), (small, Wait())]


@pytest.mark.parametrize("passed", [0, 5])
def test_row_is_not_overtaken_by_more_rows_in_one_round_either(passed: int) -> None:
    here, big = row("here", 4000), row("big", 8000, group=1, passed=passed)
    small = [row(str(i), 200, group=2) for i in range(2 * MAX_OVERTAKES)]
    decisions = admit_in_turn([big, *small], [here], AdmissionLimits(COSTS, room_for(here, *small)))
    assert admitted(decisions) == small[: MAX_OVERTAKES - passed]
    assert decisions[0] == (big, Wait(overtaken=MAX_OVERTAKES))


arrivals = st.lists(st.tuples(st.sampled_from([150, 150, 150, 400, 4_000, 9_000]), st.sampled_from(lanes)), max_size=30)


@given(st.lists(st.tuples(arrivals, st.integers(0, 5)), min_size=1, max_size=6), st.integers(4_000, 15_000))
def test_no_row_that_waits_is_overtaken_by_more_rows_than_the_limit(
    rounds: list[tuple[list[tuple[int, Lane]], int]], tokens: int
) -> None:
    """Of its lane, whatever arrives and ends, in one round or in many."""
    running, waiting, overtaken = list[RowEstimate](), list[RowEstimate](), Counter[str]()
    for number, (arrived, ending) in enumerate(rounds):
        waiting += [
            row(f"{number} {i}", each, lane, group=each)._replace(age=100 * number + i)
            for i, (each, lane) in enumerate(arrived)
        ]
        decisions = admit_in_turn(waiting, running, AdmissionLimits(COSTS, room_for(row("most", tokens))))
        begun = [each for each in admitted(decisions) if not each.preempted]
        waiting = [each._replace(overtaken=d.overtaken) for each, d in decisions if isinstance(d, Wait)]
        for each in waiting:
            overtaken[each.id] += sum(other.age > each.age and other.lane == each.lane for other in begun)
        assert max(overtaken.values(), default=0) <= MAX_OVERTAKES
        running += begun
        preempted = {id for _, decision in decisions if isinstance(decision, Admit) for id in decision.preempt}
        waiting = [each._replace(preempted=True) for each in running if each.id in preempted] + waiting
        running = [each for each in running if each.id not in preempted][ending:]


def test_overtaken_offline_row_does_not_block_interactive_ones() -> None:
    here, big = row("here", 4000), row("big", 4000, "batch", group=1, passed=MAX_OVERTAKES)
    offline, talk = row("offline", 200, "batch", group=2), row("talk", 200, group=2)
    decisions = admit_in_turn([big, offline, talk], [here], AdmissionLimits(COSTS, room_for(here, offline, talk)))
    assert decisions == [(talk, Admit()), (big, Wait(overtaken=MAX_OVERTAKES)), (offline, Wait())]


@pytest.mark.parametrize("lane", lanes)
def test_large_row_is_admitted_despite_an_endless_stream_of_small_ones(lane: Lane) -> None:
    running, waiting = [row(str(i), 400, lane) for i in range(3)], [row("big", 4000, lane)]
    limit = room_for(row("big", 4000))
    for turn in range(100):
        waiting.append(row(f"small {turn}", 400, lane))
        decisions = admit_in_turn(waiting, running, AdmissionLimits(COSTS, limit))
        running += admitted(decisions)
        waiting = [each._replace(overtaken=d.overtaken) for each, d in decisions if isinstance(d, Wait)]
        if any(each.id == "big" for each in running):
            assert MAX_OVERTAKES <= turn < 4 * MAX_OVERTAKES
            return
        running = running[1:]  # the oldest has ended
    pytest.fail("the large row never came in")


SEEING = replace(COSTS, encoder=EncoderCost(token_bytes=1_000_000, pair_bytes=500, feature_bytes=10_000))


def looking(id: str, *tokens: int) -> RowEstimate:
    """Return the estimate of a row with images of these tokens and 1,000 tokens of text."""
    return RowEstimate(id, "interactive", 1_000 + sum(tokens), 100, images=ImageDemand(max(tokens), sum(tokens)))


def test_an_image_that_never_fits_is_refused_with_the_numbers() -> None:
    assert admit(looking("new", 2_000, 8_000), [], SEEING, 12_000_000_000) == Refuse(
        "This request needs 42.4 GB while its images are encoded, of which the largest takes 8,000 tokens; this "
        "worker has 11 GB for requests: make them smaller, to about 44 % of their pixels."
    )


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=4), st.integers(2_000_000_000, 40_000_000_000))
def test_images_scaled_as_advised_are_not_refused(tokens: list[int], limit: int) -> None:
    refused = admit(looking("new", *tokens), [], SEEING, limit)
    if isinstance(refused, Refuse):
        percent = int(refused.message.split("about ")[1].split(" %")[0]) if "about" in refused.message else 0
        smaller = [each * percent // 100 for each in tokens]
        assert isinstance(admit(looking("new", *smaller), [], SEEING, limit), Admit)


def test_images_of_two_rows_are_encoded_one_after_the_other() -> None:
    one, other = looking("one", 3_000), looking("other", 3_000)
    blind = [each._replace(images=NO_IMAGES) for each in (one, other)]
    both = SEEING.peak_bytes(group_lengths(blind)) + SEEING.encoder.bytes_for(ImageDemand(3_000, 2 * 3_000))
    assert admit(other, [one], SEEING, both) == Admit()
    assert admit(other, [one], SEEING, both - 1) == Wait()


def test_refusal_of_a_long_text_with_a_small_image_advises_to_shorten_the_text() -> None:
    long = looking("long", 10)._replace(prompt_tokens=200_000)
    refused = admit(long, [], SEEING, 12_000_000_000)
    assert isinstance(refused, Refuse)
    assert "shorten the prompt" in refused.message


# Against the rules written plainly, and what it takes

WINDOWED = MemoryModel(
    weights_bytes=10_000_000,
    kv_layers=(KVLayers(8192, 1000), KVLayers(4096, 500, window=512)),
    state_bytes=100_000,
    chunk_token_bytes=2_000,
    score_bytes=64,
    encoder=EncoderCost(token_bytes=1_000, pair_bytes=10, feature_bytes=4_000, single_chunk=True),
    factor=1.37,
)
demands = st.builds(ImageDemand, *[st.integers(0, 4_000)] * 3, st.integers(0, 10**7))
estimates = st.builds(
    RowEstimate,
    id=st.just(""),
    lane=st.sampled_from(lanes),
    prompt_tokens=st.one_of(st.integers(1, 300), st.integers(1, 20_000)),
    max_tokens=st.integers(1, 600),
    group=st.integers(0, 3),
    overtaken=st.sampled_from([0, 0, 0, MAX_OVERTAKES - 1, MAX_OVERTAKES]),
    preempted=st.booleans(),
    held_bytes=st.sampled_from([0, 0, 0, 1, 2_000_000, 50_000_000]),
    images=st.one_of(st.just(NO_IMAGES), st.just(NO_IMAGES), demands),
    extra_tokens=st.just(0),
    grows=st.booleans(),
    least=st.just(1),
    likely=st.just(20),
    age=st.integers(0, 20),
)


def named(given: list[RowEstimate], prefix: str) -> list[RowEstimate]:
    return [each._replace(id=f"{prefix} {number}") for number, each in enumerate(given)]


@given(
    st.lists(estimates, max_size=14),
    st.lists(estimates, max_size=10),
    st.floats(0.0, 1.5),
    st.sampled_from([1, 3, 8, MAX_ROWS]),
    st.sampled_from([WINDOWED, COSTS]),
)
def test_each_decision_is_that_of_the_rules_written_plainly(
    waiting: list[RowEstimate], running: list[RowEstimate], share: float, max_rows: int, costs: MemoryModel
) -> None:
    waiting, running = named(waiting, "new"), sorted(named(running, "here"), key=lambda row: row.age)
    everyone = [*waiting, *running]
    spare = costs.peak_bytes(group_lengths(everyone), images=sum((each.images for each in everyone), NO_IMAGES))
    limit = costs.resident_bytes + int(share * (spare - costs.resident_bytes))
    decided = [
        (each, Refuse("") if isinstance(decision, Refuse) else decision)
        for each, decision in admit_in_turn(waiting, running, AdmissionLimits(costs, limit, max_rows))
    ]
    assert decided == plainly_in_turn(waiting, running, costs, limit, max_rows)


@pytest.mark.parametrize("lane", lanes)
def test_a_long_queue_before_a_full_memory_takes_few_predictions(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    dice, calls = random.Random(1), 0
    running = [row(f"here {i}", dice.randrange(200, 4_000), lane, group=i % 4) for i in range(64)]
    waiting = [row(f"new {i}", dice.randrange(200, 4_000), group=i % 5) for i in range(500)]
    predicted = MemoryModel.group_bytes

    def counted(self: MemoryModel, rows: int, longest: int) -> tuple[int, int]:
        nonlocal calls
        calls += 1
        return predicted(self, rows, longest)

    monkeypatch.setattr(MemoryModel, "group_bytes", counted)
    decided = admit_in_turn(waiting, running, AdmissionLimits(COSTS, room_for(*running)))
    assert any(isinstance(decision, Wait) for _, decision in decided)
    # Most rows are decided by comparing their lengths with one that did not fit. Rows that are preempted are counted.
    assert calls < (len(waiting) / 4 if lane == "interactive" else 12 * len(waiting))
