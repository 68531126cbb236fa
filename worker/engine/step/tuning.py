"""The tuned numbers of planning a step: each with its unit, its origin, and what notices a wrong one. Tests are those
of `tests/engine/step/`; "simulate" is `scripts/simulate` with five runs by the same seeds."""

# How long a gap may be

# Seconds within which waiting prompts should all be computed: they get the share of the time that this takes. Half a
# second is where people begin to notice that a first token is late. test_budget, simulate.
COMPUTED_WITHIN_S = 0.5

# What steps last, relative to their plans

# Multiple of a plan beyond which a gap is a stall: another process had the processor, or memory was reclaimed.
# test_overruns, simulate --stalls.
STALL = 1.5
# Stalls are expected again if this many of the latest gaps overran, or this many of those whose steps computed the
# same: the plan may underestimate these. Usual gaps last nearly as planned, so one of 1.2 plans overran. Gaps.
# test_overruns.
OVERRAN, OF_GAPS = 3, 20
OVERRAN_ALIKE, OF_GAPS_ALIKE = 2, 4
# Multiple of a plan that is expected at most, before the margin: a plan of less than half of the gap leaves hardly
# time for a chunk, and what lasts longer still is not prevented by it. test_overruns.
MOST_OVERRUN = 2.0
# Overruns are expected by this many of the latest gaps: the third largest counts, since the two above it may be chance.
# test_overruns, simulate.
OVERRUN_GAPS, OVERRUN_RANK = 150, 3
# Multiple of that overrun, for larger ones: a row that decodes for 30 steps should see none. Also that of a plan that a
# gap lasts before any is measured. test_overruns, simulate.
OVERRUN_MARGIN = 1.1
# Share of the longest gap that is planned at present, beyond which a gap's overrun is recorded; shorter ones could
# not become too long. test_overruns.
LONG_GAP = 0.75

# While no row decodes

# Multiple of the target that a step may last: it then delays only new requests and cancellations. test_budget; with
# fifteen, as below, simulated chats next to prompts of 6,000 tokens had 1 to 4 points fewer good answers.
ALONE_STEPS = 6
# The same for a forward that several interactive prompts share: it delays a new request more, and computes a burst in
# larger matrices. On 2 cores, tokens of prompts of 75 tokens took 4.5 ms each with six targets, 3.2 with fifteen.
# test_budget, simulate (small-forwards).
SHARED_ALONE_STEPS = 15
# Seconds for which rows that have joined put off their first decode step while prompts can be computed, and in all,
# for prompts that take at most that long each, while this makes first tokens earlier in the mean. `simulate --slower
# 1.6` needs 8 s for 32 prompts. test_first_step, simulate (decode-at-once).
FIRST_STEP_WITHIN_S, FIRST_STEP_AT_MOST_S = 1.5, 10.0

# The order of prompts

# Seconds within which a first token is good. A prompt that can no longer have one counts as taking `LATE_FACTOR`
# times its time: overload then does not make every prompt late, and a late but short one is not the last. test_plan,
# simulate.
FIRST_TOKEN_S = 2.0
LATE_FACTOR = 8
# One step in this many is for those that would else wait for ever under load: it begins with the interactive prompt
# that has waited longest, and an offline prompt computes a short chunk even if there is no time for it. test_plan.
TURN_EVERY = 8
# Seconds of its own time by which a prompt counts as shorter for each second that it has waited: it lets shorter ones
# pass until it has waited for eight times the difference. test_plan, simulate.
AGING = 1 / 8

# Chunks

# Tokens of a chunk. Above the most, a larger one is hardly faster; below the least, most of its time is overhead:
# measured on 2 cores with the bench's models. test_cost.
MIN_CHUNK, MAX_CHUNK = 16, 2048
# A prompt shares a forward if its remaining tokens are at most this many times as many as the others compute in it. The
# tokens of a longer one would delay the others, and save little. test_plan, simulate.
SHORT_CHUNKS = 3

# What is measured

# Weight of the newest chunk in the pace of a token, and of the newest step in that of steps: five follow a change of
# the device. test_cost, tests/engine/admission/test_grouping.py.
PACE_WEIGHT = 0.2
# Rows by powers of two, so that steps are compared with steps of about as many rows: 1, 2 to 3, ..., 128 and more.
# test_times.
CLASSES = 8
