"""Whom the engine lets in, and which parked caches it gives up for that. A token takes 1,000 bytes here."""

import gc
import random
from dataclasses import replace

import mlx.core as mx

from worker.engine.admission import AdmissionController, WaitingRequest
from worker.engine.batch.decode_batch import PendingTokens, PreemptedRow
from worker.engine.batch.row import Row
from worker.engine.cache.slots import Snapshot
from worker.engine.upstream.mlx_lm import KVCache
from worker.schedule.admission import Admit, Decision, Refuse
from worker.schedule.classes import Decoding
from worker.schedule.grouping import StepCost
from worker.schedule.memory import NO_IMAGES, EncoderCost, ImageDemand, KVLayers, MemoryModel
from worker.schedule.request import GenerationRequest, Lane, PromptImage

KILO = MemoryModel(weights_bytes=10, kv_layers=(KVLayers(1000, 1000),))


def sized(id: str, tokens: int, lane: Lane = "interactive") -> GenerationRequest:
    """Prompt and answer together."""
    return GenerationRequest(id, (1,) * 40, tokens - 40, lane=lane)


def begun(id: str, tokens: int) -> WaitingRequest:
    return WaitingRequest(sized(id, tokens, "batch"), preempted=True)


def parked(id: str, tokens: int, held: int = 100) -> WaitingRequest:
    """It has so many tokens in its cache."""
    layer = KVCache()
    layer.keys = layer.values = mx.zeros((1, 1, held, 125))
    layer.offset = held
    kept = PreemptedRow(
        Row.of(sized(id, tokens, "batch")), Snapshot([layer], None), PendingTokens(mx.array([1]), mx.array([True]), {})
    )
    return WaitingRequest(kept.row.request, kept, preempted=True)


def decided(entry: AdmissionController, *running: GenerationRequest) -> dict[str, Decision]:
    """Of those who do not wait any longer."""
    return {
        candidate.request.id: decision
        for candidate, decision in entry.decide([entry.estimate(each, 0) for each in running], Decoding(StepCost()))
    }


def test_a_row_that_was_inside_is_not_refused_when_a_correction_says_that_it_never_fits() -> None:
    entry = AdmissionController(KILO, limit=5_000)
    entry.requeue(begun("begun", 2000))
    entry.add(sized("new", 2000))
    assert [type(decision) for decision in decided(entry, sized("other", 41)).values()] == [Refuse]
    assert decided(entry)["begun"] == Admit()


def test_rows_that_never_fit_by_a_correction_come_back_one_at_a_time() -> None:
    entry = AdmissionController(KILO, limit=5_000)
    for id in ("second", "first"):
        entry.requeue(begun(id, 2000))
    assert decided(entry) == {"first": Admit()}


def holding(*candidates: WaitingRequest, limit: int) -> AdmissionController:
    """The first of them is the oldest, and so was parked last."""
    entry = AdmissionController(KILO, limit)
    for each in reversed(candidates):
        entry.requeue(each)
    return entry


def caches(entry: AdmissionController) -> list[str]:
    return [id for id, candidate in entry._waiting.items() if candidate.saved_row]


def test_of_parked_caches_as_few_are_given_up_as_let_another_in_and_the_youngest_first() -> None:
    room = KILO.peak_bytes([[200, 200]])
    for spare, kept in ((350_000, ["a", "b", "c"]), (250_000, ["a", "b"]), (150_000, ["a"]), (0, [])):
        entry = holding(parked("a", 500), parked("b", 500), parked("c", 500), limit=room + spare)
        entry.add(sized("new", 200))
        assert decided(entry, sized("here", 200)) == {"new": Admit()}
        assert caches(entry) == kept


def test_no_cache_is_given_up_where_that_would_let_nobody_in() -> None:
    entry = holding(parked("a", 500), parked("b", 500), limit=KILO.peak_bytes([[200]]) + 100_000)
    entry.add(sized("new", 200))
    assert decided(entry, sized("here", 200)) == {}
    assert caches(entry) == ["a", "b"]


def test_nobody_is_refused_for_what_parked_rows_hold() -> None:
    entry = holding(parked("a", 500, held=400), limit=KILO.peak_bytes([[500]]))
    entry.add(sized("new", 500))
    assert decided(entry, sized("here", 200)) == {}


def test_a_parked_row_comes_back_with_its_cache_into_the_memory_that_it_had() -> None:
    entry = holding(parked("a", 500, held=400), limit=KILO.peak_bytes([[500, 500]]))
    assert decided(entry, sized("here", 500)) == {"a": Admit()}
    assert caches(entry) == ["a"]


def test_a_row_is_parked_with_its_cache_only_where_that_fits_beside_who_takes_its_place() -> None:
    for spare, kept in ((400_000, ["b"]), (399_999, [])):
        entry = AdmissionController(KILO, limit=KILO.peak_bytes([[500, 500]]) + spare)
        entry.add(sized("new", 500))
        assert decided(entry, sized("a", 500, "batch"), sized("b", 500, "batch")) == {"new": Admit(preempt=("b",))}
        before = entry.free_bytes
        entry.requeue(parked("b", 500, held=400))
        assert caches(entry) == kept
        assert before - entry.free_bytes == 400_000 * len(kept)


def test_an_image_that_needs_what_was_predicted_corrects_nothing() -> None:
    mega = replace(KILO, weights_bytes=mx.get_active_memory(), encoder=EncoderCost(token_bytes=1_000_000))
    entry, factors = AdmissionController(mega, limit=10**12), list[float]()
    for images in ImageDemand(40), NO_IMAGES:
        for step in range(64):
            mx.reset_peak_memory()
            if step == 7:
                mx.eval(mx.zeros(40_000_000, mx.uint8))
            entry.calibrate([[10]], 1, 0, images if step == 7 else NO_IMAGES)
        factors.append(entry._correction.factor)
    assert 0.95 < factors[0] < 1.05
    assert factors[1] == factors[0], "too little to say anything"


def test_a_step_that_takes_more_than_was_predicted_is_allowed_for_at_once() -> None:
    entry = AdmissionController(KILO, limit=10**9)
    groups = [[20_000]]
    predicted = KILO.beside_bytes(groups, 1)
    for more in (0.9, 1.5, 1.0):
        mx.reset_peak_memory()
        mx.eval(mx.zeros(int(more * predicted) - mx.get_active_memory(), mx.uint8))
        entry.calibrate(groups, 1, 0)
    assert 1.49 < entry._correction.factor < 1.51
    assert entry.needs_decision, "whoever waits is decided on again"


def test_rows_that_left_are_in_the_peak_of_their_last_step_and_correct_nothing() -> None:
    # What other tests have left in memory counts as weights.
    entry = AdmissionController(replace(KILO, weights_bytes=mx.get_active_memory()), limit=10**9)
    for groups in ([[20_000] * 3], [[20_000]]):
        mx.reset_peak_memory()
        mx.eval(mx.zeros(KILO.beside_bytes([[20_000] * 3], 1) * 9 // 10, mx.uint8))
        entry.calibrate(groups, 1, 0)
    assert entry._correction.factor == 1.0


def test_buffers_that_rows_left_behind_correct_nothing() -> None:
    gc.collect()
    costs, groups = replace(KILO, weights_bytes=mx.get_active_memory()), [[20_000]]  # what other tests have left
    entry = AdmissionController(costs, limit=costs.weights_bytes + 10**9)
    buffers = 2 * KILO.rectangle_bytes([20_000])
    unneeded = entry.slack_bytes([*groups, [9]], [buffers, KILO.rectangle_bytes([9])])
    assert unneeded == buffers // 2
    mx.reset_peak_memory()
    mx.eval(mx.zeros(KILO.beside_bytes(groups, 1) + unneeded // 2, mx.uint8))
    entry.calibrate(groups, 1, 0, unneeded=unneeded)
    assert entry._correction.factor == 1.0


def test_buffers_that_rows_left_behind_are_asked_back_only_where_others_need_them() -> None:
    inside, needed = sized("here", 200), KILO.peak_bytes([[200]])
    for spare, crowded in ((1000, True), (10**9, False)):
        entry = AdmissionController(KILO, limit=needed + spare)
        buffers = [KILO.rectangle_bytes([200]) + 2000]
        entry.decide([entry.estimate(inside, 0)], Decoding(StepCost(), [[100]], [[200]], buffers))
        assert entry.crowded == crowded


def test_rows_that_are_not_tried_count_for_what_their_class_would_make_alone() -> None:
    """With the tried ones alone, too few would be short for them to be worth decoding by themselves."""
    dice, dear = random.Random(1), StepCost(group_s=0.02, row_s=0.0002, cell_s=1e-8)
    wide = replace(KILO, kv_layers=(KVLayers(8192, 4096),), chunk_token_bytes=2000, score_bytes=64)
    entry = AdmissionController(wide, limit=200_000_000)
    for i in range(60):
        entry.add(sized(str(i), dice.choice([100] * 9 + [2000]) + 40))
    entry.decide([], Decoding(dear))
    assert entry.bounds == ()


def test_a_prompt_on_its_way_is_counted_in_the_group_of_its_class() -> None:
    entry = AdmissionController(KILO, limit=10**9)
    entry.bounds = (200,)
    entry.decide([entry.estimate(sized("long", 2000), 0), entry.estimate(sized("short", 200), None)],
                 Decoding(StepCost(), [[900]], [[2000]]))  # fmt: skip
    assert entry.reserved_bytes[0] == KILO.beside_bytes([[2000], [200]])


def test_images_as_they_were_prepared_are_promised_as_long_as_the_row_is_there_and_each_once() -> None:
    one, other = (PromptImage(bytes([at]), (at, at + 1), {}, 1_000_000 * (1 + at)) for at in (0, 1))
    looks = replace(sized("looks", 100), images=(one, other, replace(one, span=(5, 6))))
    entry = AdmissionController(KILO, limit=10**9)
    entry.add(looks)
    assert decided(entry) == {"looks": Admit()}
    entry.pop(WaitingRequest(looks))
    assert entry.reserved_bytes[0] == KILO.beside_bytes([[100]]) + 3_000_000
    decided(entry, looks)  # they are known by now
    assert entry.reserved_bytes[0] == KILO.beside_bytes([[100]]) + 3_000_000


def test_what_an_image_needs_is_promised_until_it_is_known() -> None:
    mega = replace(KILO, encoder=EncoderCost(token_bytes=1_000_000))
    looks = replace(sized("looks", 100), images=(PromptImage(b"1", (1, 11), {}), PromptImage(b"2", (20, 40), {})))
    entry = AdmissionController(mega, limit=10**9)
    entry.add(looks)
    assert decided(entry) == {"looks": Admit()}
    entry.pop(WaitingRequest(looks))
    promised, spare = entry.reserved_bytes[0], entry.free_bytes
    assert promised == mega.beside_bytes([[100]]) + 20 * 1_000_000
    decided(entry, looks)  # its images are known by now
    assert entry.reserved_bytes[0] == promised - 20_000_000
    assert entry.free_bytes > spare


def test_an_image_that_is_computed_at_once_is_promised_its_chunk() -> None:
    costs = replace(KILO, chunk_token_bytes=1_000, encoder=EncoderCost(whole=True))
    entry = AdmissionController(costs, limit=10**9)
    entry.add(replace(sized("looks", 1_000), images=(PromptImage(b"1", (1, 11), {}), PromptImage(b"2", (20, 620), {}))))
    assert decided(entry) == {"looks": Admit()}
    assert entry.reserved_bytes[0] == costs.beside_bytes([[1_000]], 600)
