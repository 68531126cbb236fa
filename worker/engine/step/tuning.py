"""The tuned numbers of planning a step: each with its unit, its origin, and what notices a wrong one. Tests are those
of `tests/engine/step/`; "simulate" is `scripts/simulate` with five runs by the same seeds."""

# How long a gap may be

# Multiple of the target (`SLUICE_STEP_MS`) that a gap between two tokens of a row may last while prompts wait. A
# promise of docs/settings.md. test_budget.
GAP_STEPS = 3
# Or this multiple of the decode time, if that is longer. A promise of
# docs/settings.md. test_budget.
GAP_DECODES = 2.5
# Share of the longest gap that a step with drafts may take; the rest is for what is not predicted, such as rows that
# leave. `scripts/bench speculation`, test_budget.
WITH_DRAFTS = 0.86
# Seconds within which waiting prompts should all be computed: they get the share of the time that this takes. Half a
# second is where people begin to notice that a first token is late. test_budget, simulate.
COMPUTED_WITHIN_S = 0.5

# What steps last, relative to their plans

# Multiples of a plan. A gap beyond `STALL` is a stall: another process had the processor, or memory was reclaimed.
# One beyond `OVERRUN` overran, since usual ones last nearly as planned. test_overruns, simulate --stalls.
STALL, OVERRUN = 1.5, 1.2
# Stalls are expected again if this many of the latest gaps overran, or this many of those whose steps computed the
# same: the plan may underestimate these. Gaps. test_overruns.
OVERRAN, OF_GAPS = 3, 20
OVERRAN_ALIKE, OF_GAPS_ALIKE = 2, 4
# Multiple of a plan that is expected at most, before the margin: a plan of less than half of the gap leaves hardly
# time for a chunk, and what lasts longer still is not prevented by it. test_overruns.
MOST_OVERRUN = 2.0
# Overruns are expected by this many of the latest gaps: the third largest counts, since the two above it may be chance.
# test_overruns, simulate.
OVERRUN_GAPS, OVERRUN_RANK = 150, 3
# Multiple of that overrun, for larger ones: a row that decodes for 30 steps should see none. test_overruns, simulate.
OVERRUN_MARGIN = 1.1
# Multiple of a plan that a gap lasts before any is measured. test_overruns.
FIRST_OVERRUN = 1.1
# Share of the longest gap that is planned at present, beyond which a gap's overrun is recorded; shorter ones could
# not become too long. test_overruns.
LONG_GAP = 0.75

# While no row decodes

# Multiple of the target that a step may last: it then delays only new requests and cancellations. test_budget,
# simulate.
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
# One step in this many is for the prompts that have waited longest, so a late or long one advances under any load.
# test_plan.
OLDEST_FIRST_EVERY = 8
# Seconds of its own time by which a prompt counts as shorter for each second that it has waited: it lets shorter ones
# pass until it has waited for eight times the difference. test_plan, simulate.
AGING = 1 / 8
# In steps without enough time for an offline chunk, one in this many has a short one all the same. test_plan.
OFFLINE_EVERY = 8

# Chunks

# Tokens of a chunk. Above the most, a larger one is hardly faster; below the least, most of its time is overhead:
# measured on 2 cores with the bench's models. test_cost.
MIN_CHUNK, MAX_CHUNK = 16, 2048
# A chunk is worth its pass over the weights if its tokens take at least this multiple of the time of that pass.
# test_cost, simulate.
MIN_TOKENS_TIME_PER_PASS = 1.0
# A prompt shares a forward if its remaining tokens take at most as long as this many passes over the weights, or are
# at most `SHORT_CHUNKS` times as many as the others compute in it. The tokens of a longer one would delay the others,
# and save little. test_plan, simulate.
SHORT_PASSES = 6
SHORT_CHUNKS = 3
# The last tokens of an interactive prompt are computed with the chunk before them if they take at most this many
# passes over the weights, although the step then lasts longer than planned: in a later step they would take a pass of
# their own. The same holds for its join, which would leave a later step too little time for another chunk. test_plan.
REMAINDER_PASSES = 0.25
# Times as many rows as were measured: their decode step is not extrapolated from measured ones. test_planner.
FAR_MORE = 2

# What is assumed, and how fast measurements replace it

TOKENS_PER_S = 2000.0  # of prefill before any measurement: a small model on a laptop. test_cost
COPIED_BYTES_PER_S = 2e9  # of joins before any measurement: a memcpy on 2 cores took less. test_cost
FIRST_WEIGHT = 0.1  # of these assumptions, in measurements. test_cost
PACE_WEIGHT = 0.2  # of the newest chunk in the pace of a token: five follow a change of the device. test_cost
# Priors that amounts cost nothing, in measurements: see `LeastSquares`. While all prompts have the same length, cost
# is assigned to tokens and rows. Weak for what few measurements tell: a pass, by two chunks of different length, and
# the growth of a buffer, by one. test_cost.
LENGTH_PRIOR = 0.0, 0.1
PASS_PRIOR = 1e-3, 1e-3
GROWTH_PRIOR = 1e-3

# Step times that other workers see

# Rows by powers of two, so that steps are compared with steps of about as many rows: 1, 2 to 3, ..., 128 and more.
# test_times.
CLASSES = 8
STEP_WEIGHT = 0.05  # of the newest step: an average of some 20. test_times
VALID_S = 60.0  # seconds: a machine may get other work, so older times say nothing; a chat takes less. test_times
