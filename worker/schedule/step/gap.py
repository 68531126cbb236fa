"""The longest gap between two tokens of a row."""

from dataclasses import dataclass

# While prompts wait, a gap between two tokens of a row may last this multiple of the target, ...
GAP_STEPS = 3
# ... or at most this multiple of the decode time, if decoding alone takes more than half of that.
GAP_DECODES = 2.5
_GAP_RISE = 4.0  # seconds of a gap for each second that decoding takes beyond that half, up to `GAP_DECODES`
# Part of the longest gap that a step with drafts may take; the rest is for what is not predicted, such as rows that
# leave.
WITH_DRAFTS = 0.86


def longest_gap_s(step_s: float, decode_s: float) -> float:
    """Return the most seconds that may pass between two tokens of a row while prompts wait. `step_s`: target of a step.

    That is `GAP_STEPS` targets while decoding takes at most half of them, and rises to `GAP_DECODES` decode times."""
    gap_s = GAP_STEPS * step_s
    return max(gap_s, min(GAP_DECODES * decode_s, gap_s + _GAP_RISE * (decode_s - half_gap_s(step_s))))


def half_gap_s(step_s: float) -> float:
    """Return half of the longest gap of rows that decode fast. Decode steps that take more may make a longer gap, and
    only gaps planned to last more are compared with their plan. `step_s`: target of a step."""
    return GAP_STEPS * step_s / 2


@dataclass(frozen=True, slots=True)
class GapLimit:
    """Limits the gap that a step makes between two tokens of its rows."""

    step_s: float  # target of a step
    elapsed_s: float = 0.0  # since the last step's report, most of which prompts have taken

    def verify_s(self, decode_s: float, *, running: bool) -> float:
        """Return the most seconds that the forwards of the step may take with drafts. `decode_s`: without. `running`:
        a decode step runs, whose tokens are delivered at the end of this one."""
        longest_s = longest_gap_s(self.step_s, decode_s)
        most_s = min(WITH_DRAFTS * longest_s, longest_s - decode_s) if running else WITH_DRAFTS * longest_s
        return most_s - self.elapsed_s
