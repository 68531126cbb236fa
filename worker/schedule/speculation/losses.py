"""Limits what drafts may lose: an account of the time that they take and of the plain steps that they save."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

SHARE = 0.02  # of the time of plain steps, which all drafts together may lose
# Plain steps that all drafts together may lose in addition, before a part of that share is theirs again. With 10, the
# bundled model's head, which gains a fifth, was paused in two of three runs before its gains outweighed chance.
FIRST = 40
MOST_GAINED = 40  # plain steps: what was gained beyond that pays for no later loss
RESUMED = 2  # plain steps that a proposer must be able to lose to be tried, at first and again


@dataclass(slots=True)
class VerifiedPart:
    """What the drafts of one proposer were in a forward."""

    proposed: int = 0  # tokens
    accepted: int = 0  # of these
    seconds: float = 0.0  # that a network took to draft them

    def add(self, proposed: int, accepted: int) -> None:
        """Add the draft of a row."""
        self.proposed += proposed
        self.accepted += accepted


@dataclass(slots=True)
class _Balance:
    """Seconds that drafts of a proposer may still lose; less than none while it is paused."""

    seconds: float
    paused: bool = False

    def change(self, seconds: float, most: float) -> None:
        """Add seconds, up to a balance of `most`; a higher one stays. Fewer than 0 are taken away."""
        self.seconds = max(min(self.seconds + seconds, most), min(self.seconds, self.seconds + seconds))


class LossAccount:
    """Keeps account of what the drafts of each proposer lose and gain, as measured, whatever was expected of them.

    A proposer has a balance of seconds. What its drafts take is subtracted, the time of the plain steps that they save
    is added. It begins with `RESUMED` plain steps, and while a common fund lasts, what is used up is taken from that;
    both together are `FIRST` plain steps, however many proposers there are. After that, a proposer whose balance is
    used up is paused until its part of `SHARE` of the time of all steps has filled it again. So all decoding takes at
    most 1 + `SHARE` times the time of plain steps, `FIRST` plain steps, and one step with drafts more for each
    proposer."""

    def __init__(self, proposers: int = 1) -> None:
        """`proposers`: their number, at most `FIRST` / `RESUMED`."""
        self._fund = float(FIRST - RESUMED * proposers)  # plain steps
        self._balances = dict[object, _Balance]()
        self._step_s = 0.0  # of the last plain step; 0: unknown

    def allows(self, proposer: object) -> bool:
        """Return True if the proposer may take time."""
        balance = self._balances.get(proposer)
        return balance is None or not balance.paused

    def pass_time(self, step_s: float, steps: float = 1.0) -> None:
        """Record that `steps` plain steps of `step_s` seconds have run, or that drafts have made the tokens of as
        many."""
        self._step_s = step_s
        first_s = FIRST * step_s
        short = [balance for balance in self._balances.values() if balance.seconds < first_s]
        for balance in short:
            self._change(balance, SHARE * steps * step_s / len(short), first_s)

    def charge(self, proposer: object, seconds: float) -> None:
        """Subtract seconds that the proposer took and that plain decoding does not take; fewer than 0 were gained.
        Counts once a plain step was measured; no draft is verified before."""
        if not self._step_s:
            return
        balance = self._balances.setdefault(proposer, _Balance(RESUMED * self._step_s))
        self._change(balance, -seconds, MOST_GAINED * self._step_s)

    def charge_together(self, proposers: Collection[object], seconds: float) -> None:
        """Subtract seconds that several proposers took, an equal part for each."""
        for proposer in proposers:
            self.charge(proposer, seconds / len(proposers))

    def charge_verified(self, rows: int, seconds: float, step_s: float, parts: Mapping[object, VerifiedPart]) -> None:
        """Record a step that has verified drafts of `rows` rows. `seconds`: all that it took. `step_s`: seconds of a
        plain step of these rows. `parts`: by proposer. Each bears what its network took, and a part of what the forward
        takes longer, by the tokens that it has proposed."""
        proposed = max(1, sum(part.proposed for part in parts.values()))
        accepted = sum(part.accepted for part in parts.values())
        wider_s = seconds - step_s - sum(part.seconds for part in parts.values())
        self.pass_time(step_s, 1 + accepted / rows)
        for proposer, part in parts.items():
            saved_s = step_s * part.accepted / rows
            self.charge(proposer, part.seconds + wider_s * part.proposed / proposed - saved_s)

    def _change(self, balance: _Balance, seconds: float, most: float) -> None:
        balance.change(seconds, most)
        if balance.seconds <= 0:
            self._draw_on_fund(balance)
        if balance.seconds <= 0:
            balance.paused = True
        elif balance.seconds >= RESUMED * self._step_s:
            balance.paused = False

    def _draw_on_fund(self, balance: _Balance) -> None:
        """Fill a balance that is used up from the common fund, as far as that lasts."""
        steps = min(self._fund, RESUMED - balance.seconds / self._step_s)
        self._fund -= steps
        balance.seconds += steps * self._step_s
