"""The tuned numbers of admission: each with its unit, its origin, and what notices a wrong one. Tests are those of
`tests/engine/admission/` unless a path says otherwise."""

# Who overtakes, and what answers without a limit get

# Most rows that may overtake a row that does not fit yet. Then the rows behind it wait too, so memory is freed for it.
# test_decision, tests/engine/test_memory.py.
MAX_OVERTAKES = 16
# Tokens reserved for an answer while fewer than `KNOWN_ANSWERS` of its lane are known: a limit that workers had for
# all of them. test_growth.
FIRST_ANSWER = 1_024
KNOWN_ANSWERS, RECENT_ANSWERS = 16, 256  # answers of a lane: needed to predict, and that count. test_growth
# Share of recent answers that is not longer than what is reserved at admission: less reserves too little to admit by,
# and rows are preempted; more leaves memory unused. `scripts/simulate --memory`.
QUANTILE = 0.8
GROWTH = 8  # an outgrown reservation gets at least 1 / this more, as buffers do: see `padded_shape`. test_growth

# Length classes

MOST_CLASSES = 4  # test_classes
# Multiple of the tokens per second that new bounds must reach, since decoding rows are not moved at once.
# test_classes.
LEAST_GAIN = 1.15
# Share of the rate at which the classes would decode in turn that bounds must reach: see `rate_in_turns`. With
# lengths of 100 and 2,000 tokens and passes that cost as much as 100 rows, classes reached 0.72 of that rate and ran
# 0.87 times as fast as no classes. test_classes.
LEAST_OF_TURNS = 0.8
ROWS_TRIED = 32  # first waiting rows for which bounds are tried: the time of a plan. test_plan
CHOOSE_BOUNDS_EVERY = (
    8  # plans: choosing takes several times as long as a plan. tests/engine/test_admission_controller.py
)

# Groups of decoding rows

# Share of a step's time below which rows are divided or moved: moving costs a copy, and measurements are noisy.
# test_grouping.
REGROUP_BELOW = 0.85
# Prior that groups, rows and cells cost nothing, in measurements: see `LeastSquares`. Weak for groups: while all
# steps are alike, their cost is assigned to the passes over the weights, so rows are not divided before length is
# measured to cost. test_grouping.
COST_PRIOR = 1e-3, 10.0, 0.3
PACE_WEIGHT = 0.2  # of the newest step in the pace of steps: five follow a change of the device. test_grouping
MAX_STALENESS = 1.25  # multiple of the last step's pace that the pace is at most. test_grouping

# Predicted memory, corrected by measurements: tests/engine/test_correction.py, tests/engine/test_step_memory.py

CALIBRATE_EVERY = 64  # steps between two comparisons of predicted and measured memory
RECORD_EVERY = 16  # one step in this many is recorded at least; divides `CALIBRATE_EVERY`
NOISE_BYTES = 16_000_000  # below this, a measurement reflects mostly the allocator
# Weights of the newest measurement: running out of memory is worse than leaving some unused.
WEIGHT_UP, WEIGHT_DOWN = 0.5, 0.05
LEAST_FACTOR, MOST_FACTOR = 0.5, 4.0  # of measured to predicted memory
