"""The tuned numbers of speculation: unit, origin, and what notices a wrong one. Those of a single source of drafts
stand beside their use.

All were measured on two CPU cores, with the bundled model and with random ones of 70 M parameters. Tests are those of
`tests/engine/speculation/`."""

# What drafts may lose (`DraftBudget`)

# Share of the time of plain steps that may be lost where drafts gain nothing, by all sources together.
# test_budget.py, test_trials.py, `scripts/bench speculation --task free count`
LOSS_SHARE = 0.01
# Plain steps that a source may lose at first, and that its gains pay for later: with 10, the bundled head, which
# gains a fifth, was paused in two of three runs before its gains outweighed chance. test_budget.py, test_trials.py
CREDIT = 40

# If a width pays (`choose_width`): test_width.py simulates machines for all of these.

LEAST_GAIN = 1.03  # times the tokens per second: a forward cannot be launched before the last one's tokens are read
SAMPLES = 9  # of the last forwards of a shape
TRIALS = 2  # forwards of a shape until they are believed: the first one may compile kernels
STALE = 500  # forwards after which a shape's costs are measured anew when it would pay by its neighbours' costs
TRIAL_EVERY = 16  # forwards from one trial of a shape that is hardly known to the next
STALLED = 3.0  # times its usual seconds, from which a step was stalled by other work of the machine. test_budget.py
TOKEN_COST = 0.05  # plain steps of a token more per row, before any measurement: of a dense model
ROW_COST = 0.03  # plain steps of a row, and of a token more for each row, likewise
DRAFT_COST = 0.2  # plain steps for each token of a network's draft, before any measurement
# Steps from the last measured plain one to the next, while all verify drafts; older forwards are compared with the
# plain steps of their time, not of now.
PLAIN_EVERY = 96
PLAIN_WANTED = 3  # measurements then, of which single slow ones do not count

# Texts that sources read

# Tokens of a row that can be copied: at most 2 MB a row, as much again for a prediction. test_copies.py
WINDOW = 65_536
# Tokens indexed in a step, of all rows: a quarter of a millisecond; and for each offer, of its row. test_copies.py
INDEXED_PER_STEP = 1_024
INDEXED_PER_OFFER = 64
MAX_AGREEMENT = 32  # tokens of an ending that are compared; longer ones count as this long. test_ngrams.py
MAX_PREFILL = 256  # tokens of a prompt that a draft model computes at once: memory is reserved. test_draft_prefill.py
