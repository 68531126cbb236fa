"""What drafts may cost: what proposers have lost, how rarely rows are asked for drafts that do not pay, and the plain
steps by which that is measured."""

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


LONGEST_PAUSE = 15  # steps between two in which drafts are asked for: what begins to pay is noticed after 16 at most
PAUSE_AFTER_JOIN = 3  # steps: a new row may be worth drafts, and rows may join in each step
_PATIENCE = 8  # asks of a worker without a pause at the beginning, while costs are measured


class Backoff:
    """Decides in which steps of a group its proposers are asked: in each while drafts are worthwhile, else after a
    pause that doubles each time."""

    def __init__(self, other: "Backoff | None" = None) -> None:
        """`other`: of the group that was asked last, from which a new group takes its pause."""
        self._patience: int = other._patience if other else _PATIENCE
        self._pause: int = min(other._pause, PAUSE_AFTER_JOIN) if other else 0  # steps
        self._left = 0  # steps

    def advance(self) -> bool:
        """Advance by a step, and return True if proposers are asked in it. Then `observe` must be called."""
        if self._left == 0:
            return True
        self._left -= 1
        return False

    def observe(self, worthwhile: bool) -> None:
        """Record if the drafts of the step are worthwhile."""
        if worthwhile:
            self._pause = 0
        elif self._patience:
            self._patience -= 1
        else:
            self._pause = min(2 * self._pause + 1, LONGEST_PAUSE)
        self._left = self._pause

    def join(self) -> None:
        """Record that rows have joined the group: shorten the pause, so that they are asked soon. However often rows
        join, `PAUSE_AFTER_JOIN` steps remain between two asks that are not worthwhile."""
        waited = self._pause - self._left
        self._pause = min(self._pause, PAUSE_AFTER_JOIN)
        self._left = max(0, self._pause - waited)


EVERY = 96  # steps from the last measured plain one
MOST = 6  # plain steps in a row: one is timed if it follows two others, and no row joins meanwhile
WANTED = 3  # measurements, of which single slow ones do not count
RETRIED = 32  # steps of rows that no plain one was measured of: it is tried again, since rows left or joined meanwhile


class Baseline:
    """Decides in which steps of a worker no drafts are verified. What drafts gain is judged by the cost of plain steps,
    which changes with the rows' lengths, with the device and with what else runs on it."""

    def __init__(self) -> None:
        self._steps = 0  # since plain steps were measured
        self._measured = 0  # in the plain steps that are due
        self._unknown = 0  # steps in a row of which it is not known what plain ones take

    def advance(self, *, known: bool = True) -> bool:
        """Advance by a step, and return True if it should be a plain one. `known`: it is known what plain steps of as
        many rows take; if not, that is measured first."""
        self._unknown = 0 if known else self._unknown % RETRIED + 1
        self._steps += 1
        if self._steps > EVERY + MOST or self._measured == WANTED:
            self._steps = self._measured = 0
        return self._steps > EVERY or 0 < self._unknown <= MOST

    def observe_plain(self) -> None:
        """Record that a plain step was measured."""
        if self._steps > EVERY:
            self._measured += 1
        else:
            self._steps = 0
