"""The tuned numbers of speculation: unit, origin, and what notices a wrong one.

All were measured on two CPU cores, with the bundled model and with random ones of 70 M parameters."""

# What drafts may lose (`budget`).
# Shares of the time of plain steps. A worker may lose 1 % where drafts gain nothing: there they are looked for in vain,
# and hardly any is verified. tests/engine/speculation/test_budget.py, `scripts/bench speculation --task free count`
ASK_SHARE = 0.004
LOSS_SHARE = 0.01
# Plain steps that a source may lose at first, and that its gains pay for later: with 10, the bundled head, which
# gains a fifth, was paused in two of three runs before its gains outweighed chance. test_budget.py, test_trials.py
CREDIT = 40
RESUMED = 2  # plain steps that a paused source must be able to lose to be tried again. test_budget.py
ASK_CREDIT = 4  # plain steps for which drafts may be looked for in vain, of what others have gained. test_budget.py

# If a width pays (`width`). tests/engine/speculation/test_width.py simulates machines for all of these.
LEAST_GAIN = 1.03  # times the tokens per second: a forward cannot be launched before the last one's tokens are read
SAMPLES = 9  # of the last forwards of a shape
TRIALS = 2  # forwards of a shape until they are believed: the first one may compile kernels
OUTDATED = 64  # forwards after which seconds are compared with those of plain steps at their time, not of now
STALE = 500  # forwards after which a shape's costs are measured anew when it would pay by its neighbours' costs
TRIAL_EVERY = 16  # forwards from one trial of a shape that is hardly known to the next
MEAN_OF = 24  # plain steps, about: three in a hundred are while drafts are verified, and single ones vary by a fifth
STALLED = 3.0  # times its usual seconds, from which a step was stalled by other work of the machine
TOKEN_COST = 0.05  # plain steps of a token more per row, before any measurement: of a dense model
ROW_COST = 0.03  # plain steps of a row, and of a token more for each row, likewise
NEAR = 0.75  # share of a number of rows down to which its plain steps tell what those of fewer rows take
DRAFT_COST = 0.2  # plain steps for each token of a network's draft, before any measurement
PLAIN_EVERY = 96  # steps from the last measured plain one to the next, while all verify drafts
PLAIN_AGAIN = 32  # steps after which plain ones run for numbers of rows of which none was measured
PLAIN_MOST = 6  # plain steps in a row: one is timed if it follows two others, and no row joins meanwhile
PLAIN_WANTED = 3  # measurements, of which single slow ones do not count

# How often tokens are right (`offer`). tests/engine/speculation/test_acceptance.py
PRIOR_TOKENS = 4.0  # tokens that a prior counts as
SHARED_MEMORY = 0.995  # weight that an observation keeps when the next one is made: the last 200 count
ROW_MEMORY = 0.9  # the last ten, so a row that begins to copy, or ceases to, is noticed at once
NETWORK_MEMORY = 0.98  # the last 50 of a depth: single rows have too few to tell
LEAST_RATE = 0.005
MOST_RATE = 0.995
# Drafts of a network that are compared before its own rates are believed, and not those that are hoped for.
# test_trials.py
KNOWN = 12

# Copies (`copies`). tests/engine/speculation/test_copies.py, test_ngrams.py
WINDOW = 65_536  # tokens of a row that can be copied: at most 2 MB a row, as much again for a prediction
GRAM = 2  # tokens of the shortest ending that is looked up: a single one occurs by chance
MAX_AGREEMENT = 32  # tokens of an ending that are compared; longer ones count as this long
CANDIDATES = 8  # positions that a lookup compares, the most recent first
LEAST_SLOTS = 1 << 10  # of a table
CROWDED = 4  # indexed tokens per slot of the table from which on it is built anew, larger
INDEXED_PER_STEP = 1_024  # tokens of all rows, a quarter of a millisecond: a long prompt is divided among steps
INDEXED_PER_OFFER = 64  # tokens of each row, which it has drawn since it was asked last
FOLLOWED = 64  # tokens of an answer that a new row may have and is compared with its prediction from the beginning
CLASSES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # lengths of endings with an acceptance rate of their own
# Rates for endings below 4, below 8, and longer, of `scripts/bench speculation`: lower than those of copied text, since
# they are learned without forwards too, and short endings occur by chance.
COPY_PRIORS = (0.15, 0.5, 0.8)
PREDICTION_PRIORS = (0.5, 0.8, 0.9)  # likewise

# Grammars (`forced`). tests/engine/speculation/test_forced.py, test_guesses.py
SURE = 0.98  # rate of forced tokens: a model's may be cut differently than the grammar's text
MIN_ACCEPTANCE = 0.2  # of a guess, and all tokens before it, to be right; a draft ends before a less probable one
MOST_CHOICES = 1 / 8  # of the vocabulary: in free text, where a grammar allows more, no token is usual
GUESS_MEMORY = 0.9  # weight that an observation keeps when the next one is made
GUESS_RIGHT = 0.5  # guesses that count as right before any was made, of `GUESS_COMPARED`
GUESS_COMPARED = 1.0  # guesses
REPLACED = 0.4  # share of right guesses below which the newest token becomes the usual one
GUESSES = 1_024  # entries of a table: some hundred bytes each
NAMESPACES = 64  # tables

# Networks (`draft_model`, `mtp`). tests/engine/speculation/test_trials.py, test_draft_prefill.py
# Rates that are hoped for, by depth: what would not pay with these is not tried.
HEAD_RATES = (0.85, 0.8, 0.75)  # published heads are trained for one token, and later ones are right less often
DRAFT_RATE = 0.8
DRAFT_DEPTH = 4  # tokens of a draft model's draft
# Steps until a network that does not pay is tried again, which takes most of a step: after it has paid, and at most,
# since they double each time.
RETRIED, RETRIED_MOST = 8, 256
# Tokens of a prompt that are computed for each token of the answer that is still to come: a draft model computes a
# token in a small part of the time of a decode step. tests/engine/speculation/test_draft_model.py
PREFILL_PER_TOKEN = 8
LIKELY_ANSWER = 256  # tokens: `max_tokens` is often far more than an answer has
MAX_PREFILL = 256  # tokens: memory is reserved for a chunk of as many
MIN_PREFILL = 16  # tokens: a chunk of fewer would be little more than its pass over the weights
PREFILL_TRIED = 16  # calls without time for a chunk, after which one is computed all the same
