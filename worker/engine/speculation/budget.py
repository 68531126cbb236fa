"""What drafts may lose: the second of the two rules by which they are verified. The first, if a width pays, is in
`width`."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from worker.engine.speculation.tuning import ASK_CREDIT, ASK_SHARE, CREDIT, LOSS_SHARE, RESUMED


@dataclass(slots=True)
class _Balance:
    """Seconds that drafts of a source may still lose, and if it is paused, since it has none left."""

    seconds: float
    paused: bool = False


class DraftBudget:
    """Keeps account of what drafts lose and gain, as measured, whatever was expected of them.

    Looking for drafts that no forward verifies may take `ASK_SHARE` of the time of plain steps, of all sources
    together, and what drafts gain. Each source has a balance. What a step with its drafts takes longer is subtracted,
    the time of the plain steps that they save is added. A source whose balance is used up is paused until its part of
    `LOSS_SHARE` has filled it with `RESUMED` plain steps again. So all decoding takes at most 1 + `ASK_SHARE` +
    `LOSS_SHARE` times the time of plain steps, and for each source `CREDIT` plain steps and one step with drafts
    more."""

    def __init__(self) -> None:
        self._ask_s = 0.0  # seconds for which drafts may still be looked for in vain
        self._balances = dict[object, _Balance]()
        self._step_s = 0.0  # of the last plain step; 0: none was measured, and no draft is verified before

    @property
    def may_ask(self) -> bool:
        """True if drafts may be looked for in this step."""
        return self._step_s > 0 and self._ask_s >= 0

    def allows(self, source: object) -> bool:
        """Return True if the source may take time."""
        balance = self._balances.get(source)
        return balance is None or not balance.paused

    def pass_time(self, step_s: float, steps: float = 1.0) -> None:
        """Record that `steps` plain steps of `step_s` seconds have run, or that drafts have made the tokens of as
        many."""
        self._step_s = step_s
        time_s = steps * step_s
        self._ask_s = min(self._ask_s + ASK_SHARE * time_s, ASK_CREDIT * step_s)
        if short := [each for each in self._balances.values() if each.seconds < CREDIT * step_s]:
            for balance in short:
                self._change(balance, LOSS_SHARE * time_s / len(short))

    def charge_asks(self, seconds: float) -> None:
        """Subtract seconds for which drafts were looked for, if no forward has verified any."""
        self._ask_s -= seconds

    def charge(self, source: object, seconds: float) -> None:
        """Subtract seconds that a source took and that plain decoding does not take; fewer than 0 were gained."""
        balance = self._balances.setdefault(source, _Balance(CREDIT * self._step_s))
        self._change(balance, -seconds)

    def charge_verified(
        self,
        rows: int,
        seconds: float,
        step_s: float,
        drafts: Sequence[tuple[object, int, int]],
        network: tuple[object, float] | None = None,
    ) -> None:
        """Record a step that has verified drafts of `rows` rows. `seconds`: all that it took. `step_s`: seconds of a
        plain step of these rows. `drafts`: source, tokens and right tokens of each. `network`: that has drafted for
        them, and its seconds. It bears these, and each source a part of what the forward takes longer, by its
        tokens."""
        self.pass_time(step_s, 1 + sum(right for *_, right in drafts) / rows)
        lost_s = defaultdict[object, float](float)
        if network:
            lost_s[network[0]] += network[1]
        wider_s = seconds - step_s - (network[1] if network else 0.0)
        proposed = sum(tokens for _, tokens, _ in drafts)
        for source, tokens, right in drafts:
            lost_s[source] += wider_s * tokens / proposed - step_s * right / rows
        for source, lost in lost_s.items():
            self.charge(source, lost)
        self._ask_s = min(self._ask_s + max(0.0, -sum(lost_s.values())), ASK_CREDIT * step_s)

    def _change(self, balance: _Balance, seconds: float) -> None:
        balance.seconds = min(balance.seconds + seconds, max(balance.seconds, CREDIT * self._step_s))
        if balance.seconds <= 0:
            balance.paused = True
        elif balance.seconds >= RESUMED * self._step_s:
            balance.paused = False
