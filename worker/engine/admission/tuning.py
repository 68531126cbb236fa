"""The tuned numbers of admission that are used at several places: each with its unit, its origin, and what notices a
wrong one. Tests are those of `tests/engine/admission/` unless a path says otherwise."""

# Most rows that may overtake a row that does not fit yet. Then the rows behind it wait too, so memory is freed for it.
# test_decision, tests/engine/test_memory.py.
MAX_OVERTAKES = 16
# Tokens reserved for an answer while fewer than `KNOWN_ANSWERS` of its lane are known: a limit that workers had for
# all of them. test_growth.
FIRST_ANSWER = 1_024
KNOWN_ANSWERS = 16
# Share of recent answers that is not longer than what is reserved at admission: less reserves too little to admit by,
# and rows are preempted; more leaves memory unused. `scripts/simulate --memory`.
QUANTILE = 0.8
# Multiple of the tokens per second that other groups or length classes must reach: decoding rows are moved by copies,
# and measurements are noisy. test_classes, test_grouping.
LEAST_GAIN = 1.15
# Predicted memory below which a measurement reflects mostly the allocator, in bytes; and measured memory in that
# predicted, at most. tests/engine/test_correction.py, tests/engine/test_step_memory.py.
NOISE_BYTES = 16_000_000
MOST_FACTOR = 4.0
