"""The requests that are admitted, and the saved caches that are dropped for them. A token takes 1,000 bytes here."""

import gc
import random
from dataclasses import replace

import mlx.core as mx

from sluice.contract.keys import Lane
from worker.engine.admission.classes import Decoding
from worker.engine.admission.decision import AdmissionLimits, Admit, Decision, Refuse
from worker.engine.admission.grouping import StepCost
from worker.engine.admission.plan import AdmissionPlan, plan_admission
from worker.engine.admission_controller import AdmissionController, WaitingRequest
from worker.engine.batch.decode_batch import PreemptedRow
from worker.engine.batch.row import PendingTokens, Row
from worker.engine.cache.slots import RowCache
from worker.engine.memory import NO_IMAGES, EncoderCost, ImageDemand, KVLayers, MemoryModel
from worker.engine.upstream.mlx_lm import KVCache
from worker.request import GenerationRequest, PromptImage, SpecPrefillParams

KILO = MemoryModel(weights_bytes=10, kv_layers=(KVLayers(1000, 1000),))


def sized(id: str, tokens: int, lane: Lane = "interactive") -> GenerationRequest:
    """Return a request of `tokens` tokens, prompt and answer together."""
    return GenerationRequest(id, (1,) * 40, tokens - 40, lane=lane)


def begun(id: str, tokens: int) -> WaitingRequest:
    return WaitingRequest(sized(id, tokens, "batch"), preempted=True)


def preempted(id: str, tokens: int, held: int = 100) -> WaitingRequest:
    """Return a preempted request with `held` tokens in its saved cache."""
    layer = KVCache()
    layer.keys = layer.values = mx.zeros((1, 1, held, 125))
    layer.offset = held
    kept = PreemptedRow(Row.of(sized(id, tokens, "batch")), RowCache([layer]), PendingTokens.known([1]))
    return WaitingRequest(kept.row.request, kept, preempted=True)


def plan(admission: AdmissionController, *running: GenerationRequest) -> AdmissionPlan:
    """Return the plan for these active requests."""
    return admission.decide([admission.estimate(Row.of(each), 0) for each in running], Decoding(StepCost()))


def decided(admission: AdmissionController, *running: GenerationRequest) -> dict[str, Decision]:
    """Apply the plan, and return the decisions on the requests that do not keep waiting."""
    planned = plan(admission, *running)
    admission.apply(planned)
    admitted = {id: Admit(preempt) for id, preempt in planned.admit.items()}
    return {**admitted, **{id: Refuse(message) for id, message in planned.refuse.items()}}


def test_refusal_of_a_prompt_that_is_to_be_scored_counts_its_own_tokens() -> None:
    admission = AdmissionController(replace(KILO, draft=KILO), limit=4_000_000)
    specprefill = SpecPrefillParams(0.2, ((0, 2_999),), 0, requested=False)
    admission.add(GenerationRequest("scored", (1,) * 3_000, 100, specprefill=specprefill))
    (refused,) = decided(admission).values()
    assert isinstance(refused, Refuse)
    assert " for 3,000 prompt and 100 answer tokens" in refused.message


def test_preempted_row_is_not_refused_after_a_correction_by_which_it_never_fits() -> None:
    admission = AdmissionController(KILO, limit=5_000)
    admission.requeue(begun("begun", 2000))
    admission.add(sized("new", 2000))
    assert [type(decision) for decision in decided(admission, sized("other", 41)).values()] == [Refuse]
    assert decided(admission)["begun"] == Admit()


def test_preempted_rows_that_no_longer_fit_are_readmitted_one_at_a_time() -> None:
    admission = AdmissionController(KILO, limit=5_000)
    for id in ("second", "first"):
        admission.requeue(begun(id, 2000))
    assert decided(admission) == {"first": Admit()}


def holding(*candidates: WaitingRequest, limit: int) -> AdmissionController:
    """Return a controller with these preempted requests. The first is the oldest, and so was preempted last."""
    admission = AdmissionController(KILO, limit)
    for each in reversed(candidates):
        admission.requeue(each)
    return admission


def caches(admission: AdmissionController) -> list[str]:
    return [id for id, candidate in admission._waiting.items() if candidate.saved_row]


def test_as_few_saved_caches_are_dropped_as_admit_another_row_the_youngest_first() -> None:
    room = KILO.peak_bytes([[200, 200]])
    for spare, kept in ((350_000, ["a", "b", "c"]), (250_000, ["a", "b"]), (150_000, ["a"]), (0, [])):
        admission = holding(preempted("a", 500), preempted("b", 500), preempted("c", 500), limit=room + spare)
        admission.add(sized("new", 200))
        assert decided(admission, sized("here", 200)) == {"new": Admit()}
        assert caches(admission) == kept


def test_no_saved_cache_is_dropped_if_that_admits_no_row() -> None:
    admission = holding(preempted("a", 500), preempted("b", 500), limit=KILO.peak_bytes([[200]]) + 100_000)
    admission.add(sized("new", 200))
    assert decided(admission, sized("here", 200)) == {}
    assert caches(admission) == ["a", "b"]


def test_saved_caches_never_cause_a_refusal() -> None:
    admission = holding(preempted("a", 500, held=400), limit=KILO.peak_bytes([[500]]))
    admission.add(sized("new", 500))
    assert decided(admission, sized("here", 200)) == {}


def test_preempted_row_is_readmitted_with_its_cache_into_the_memory_that_it_had() -> None:
    admission = holding(preempted("a", 500, held=400), limit=KILO.peak_bytes([[500, 500]]))
    assert decided(admission, sized("here", 500)) == {"a": Admit()}
    assert caches(admission) == ["a"]


def test_cache_of_a_preempted_row_is_saved_only_if_it_fits_besides_the_row_that_replaces_it() -> None:
    for spare, kept in ((400_000, ["b"]), (399_999, [])):
        admission = AdmissionController(KILO, limit=KILO.peak_bytes([[500, 500]]) + spare)
        admission.add(sized("new", 500))
        assert decided(admission, sized("a", 500, "batch"), sized("b", 500, "batch")) == {"new": Admit(preempt=("b",))}
        before = admission.free_bytes
        dropped = admission.requeue(preempted("b", 500, held=400))
        assert caches(admission) == kept
        assert [each.row.id for each in dropped] == ([] if kept else ["b"])
        assert before - admission.free_bytes == 400_000 * len(kept)


def test_image_that_takes_the_predicted_memory_corrects_nothing() -> None:
    mega = replace(KILO, weights_bytes=mx.get_active_memory(), encoder=EncoderCost(token_bytes=1_000_000))
    admission, factors = AdmissionController(mega, limit=10**12), list[float]()
    for images in ImageDemand(40), NO_IMAGES:
        for step in range(64):
            mx.reset_peak_memory()
            if step == 7:
                mx.eval(mx.zeros(40_000_000, mx.uint8))
            admission.calibrate([[10]], 1, 0, images if step == 7 else NO_IMAGES)
        factors.append(admission.calibration.factor)
    assert 0.95 < factors[0] < 1.05
    assert factors[1] == factors[0], "too few bytes to be measured"


def test_step_that_takes_more_than_predicted_corrects_at_once() -> None:
    gc.collect()
    costs, groups = replace(KILO, weights_bytes=mx.get_active_memory()), [[20_000]]  # what other tests have left
    admission = AdmissionController(costs, limit=10**9)
    predicted = costs.working_bytes(groups, 1)
    for more in (0.9, 1.5, 1.0):
        mx.reset_peak_memory()
        mx.eval(mx.zeros(int(more * predicted), mx.uint8))
        admission.calibrate(groups, 1, 0)
    assert 1.49 < admission.calibration.factor < 1.51
    assert admission.needs_decision, "waiting rows get a new decision"


def test_rows_that_left_in_the_last_step_correct_nothing() -> None:
    # What other tests have left in memory counts as weights.
    admission = AdmissionController(replace(KILO, weights_bytes=mx.get_active_memory()), limit=10**9)
    for groups in ([[20_000] * 3], [[20_000]]):
        mx.reset_peak_memory()
        mx.eval(mx.zeros(KILO.working_bytes([[20_000] * 3], 1) * 9 // 10, mx.uint8))
        admission.calibrate(groups, 1, 0)
    assert admission.calibration.factor == 1.0


def test_slack_of_buffers_corrects_nothing() -> None:
    gc.collect()
    costs, groups = replace(KILO, weights_bytes=mx.get_active_memory()), [[20_000]]  # what other tests have left
    admission = AdmissionController(costs, limit=costs.weights_bytes + 10**9)
    buffers = 2 * KILO.rectangle_bytes([20_000])
    slack_bytes = KILO.slack_bytes([*groups, [9]], [buffers, KILO.rectangle_bytes([9])])
    assert slack_bytes == buffers // 2
    mx.reset_peak_memory()
    mx.eval(mx.zeros(KILO.working_bytes(groups, 1) + slack_bytes // 2, mx.uint8))
    admission.calibrate(groups, 1, 0, slack_bytes=slack_bytes)
    assert admission.calibration.factor == 1.0


def test_buffers_are_tightened_only_if_other_rows_need_the_memory() -> None:
    active, needed = sized("here", 200), KILO.peak_bytes([[200]])
    for spare, must_tighten in ((1000, True), (10**9, False)):
        admission = AdmissionController(KILO, limit=needed + spare)
        buffers = [KILO.rectangle_bytes([200]) + 2000]
        planned = admission.decide(
            [admission.estimate(Row.of(active), 0)], Decoding(StepCost(), [[100]], [[200]], buffers)
        )
        assert planned.reservation.must_tighten == must_tighten


def test_rows_beyond_the_tried_ones_count_in_the_rate_of_classes_in_turn() -> None:
    """Among the tried rows alone, too few are short for a class of their own to be faster."""
    rng, expensive = random.Random(1), StepCost(group_s=0.02, row_s=0.0002, cell_s=1e-8)
    large_costs = replace(KILO, kv_layers=(KVLayers(8192, 4096),), chunk_token_bytes=2000, score_bytes=64)
    admission = AdmissionController(large_costs, limit=200_000_000)
    for i in range(60):
        admission.add(sized(str(i), rng.choice([100] * 9 + [2000]) + 40))
    assert admission.decide([], Decoding(expensive)).bounds == ()


def test_row_in_prefill_is_counted_in_the_group_of_its_class() -> None:
    admission = AdmissionController(KILO, limit=10**9)
    rows = [admission.estimate(Row.of(sized("long", 2000)), 0), admission.estimate(Row.of(sized("short", 200)), None)]
    decoding = Decoding(StepCost(), [[900]], [[2000]])
    planned = plan_admission([], rows, decoding, (200,), AdmissionLimits(KILO, 10**9, 100))
    assert planned.reservation.peak_bytes == KILO.peak_bytes([[2000], [200]])


def test_pixel_inputs_stay_reserved_while_the_row_is_active_and_equal_images_count_once() -> None:
    one, other = (PromptImage(bytes([at]), (at, at + 1), {}, 1_000_000 * (1 + at)) for at in (0, 1))
    with_images = replace(sized("looks", 100), images=(one, other, replace(one, span=(5, 6))))
    admission = AdmissionController(KILO, limit=10**9)
    admission.add(with_images)
    assert decided(admission) == {"looks": Admit()}
    admission.pop(with_images.id)
    assert admission.reserved_bytes[0] == KILO.working_bytes([[100]]) + 3_000_000
    decided(admission, with_images)  # they are encoded by now
    assert admission.reserved_bytes[0] == KILO.working_bytes([[100]]) + 3_000_000


def test_memory_to_encode_an_image_is_reserved_until_it_is_encoded() -> None:
    mega = replace(KILO, encoder=EncoderCost(token_bytes=1_000_000))
    with_images = replace(sized("looks", 100), images=(PromptImage(b"1", (1, 11), {}), PromptImage(b"2", (20, 40), {})))
    admission = AdmissionController(mega, limit=10**9)
    admission.add(with_images)
    assert decided(admission) == {"looks": Admit()}
    admission.pop(with_images.id)
    reserved, spare = admission.reserved_bytes[0], admission.free_bytes
    assert reserved == mega.working_bytes([[100]]) + 20 * 1_000_000
    decided(admission, with_images)  # its images are encoded by now
    assert admission.reserved_bytes[0] == reserved - 20_000_000
    assert admission.free_bytes > spare


def test_image_computed_in_one_chunk_has_that_chunk_reserved() -> None:
    costs = replace(KILO, chunk_token_bytes=1_000, encoder=EncoderCost(single_chunk=True))
    admission = AdmissionController(costs, limit=10**9)
    admission.add(
        replace(sized("looks", 1_000), images=(PromptImage(b"1", (1, 11), {}), PromptImage(b"2", (20, 620), {})))
    )
    assert decided(admission) == {"looks": Admit()}
    assert admission.reserved_bytes[0] == costs.working_bytes([[1_000]], 600)


def test_a_plan_changes_nothing_until_it_is_applied() -> None:
    admission = holding(preempted("a", 500), preempted("b", 500), limit=KILO.peak_bytes([[200, 200]]))
    admission.add(sized("new", 200))
    before = (admission.free_bytes, admission.longest_chunk, admission.reserved_bytes)
    planned = plan(admission, sized("here", 200))
    assert (admission.free_bytes, admission.longest_chunk, admission.reserved_bytes) == before
    assert caches(admission) == ["a", "b"]
    assert admission.needs_decision
    assert plan(admission, sized("here", 200)) == planned
    assert planned.drop_caches == ("b", "a")
    assert planned.overtaken == {"a": 0, "b": 0}
    assert [dropped.row.id for dropped in admission.apply(planned)] == ["b", "a"]
    assert (admission.free_bytes, admission.longest_chunk) == (planned.shares.free_bytes, planned.shares.longest_chunk)
    assert caches(admission) == []
    assert not admission.needs_decision
    assert planned.admit == {"new": ()}
    assert [*admission._waiting] == ["a", "b", "new"], "until `pop`"
