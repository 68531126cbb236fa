"""Correction of predicted memory by the memory that steps have used."""

from dataclasses import dataclass

_CALIBRATE_EVERY = 64  # steps between two comparisons of predicted and measured memory
_RECORD_EVERY = 16  # one step in this many is recorded at least; divides `_CALIBRATE_EVERY`
_NOISE_BYTES = 16_000_000  # below this, a measurement reflects mostly the allocator
_UP, _DOWN = 0.5, 0.05  # weights of the newest measurement: running out of memory is worse than leaving some unused
_LEAST, _MOST = 0.5, 4.0  # limits of the factor


@dataclass(frozen=True, slots=True)
class Correction:
    """Ratio of measured to predicted memory, applied as `MemoryModel.factor`."""

    factor: float = 1.0

    def exceeded(self, predicted: int, measured: int) -> "Correction":
        """Return the correction after one step's measurement: it rises at once to measured / predicted, and never
        falls. `predicted`: bytes before correction."""
        if predicted < _NOISE_BYTES:
            return self
        return Correction(max(self.factor, min(_MOST, measured / predicted)))

    def observe(self, predicted: int, measured: int) -> "Correction":
        """Return the correction moved towards measured / predicted, faster upwards than downwards. Both are peak bytes
        in addition to the weights; `predicted` is `MemoryModel.working_bytes` of the rows that ran."""
        if predicted < _NOISE_BYTES:
            return self
        ratio = min(_MOST, max(_LEAST, measured / predicted))
        weight = _UP if ratio > self.factor else _DOWN
        return Correction(self.factor + weight * (ratio - self.factor))


class Calibration:
    """The present correction, and the measurements since the last comparison. Bytes are those of
    `MemoryModel.working_bytes`: without weights, and not corrected."""

    def __init__(self) -> None:
        self._correction = Correction()
        self._steps = 0
        self._last_predicted = 0  # for the step recorded last
        self._max_predicted = self._max_measured = 0  # of a step since the last comparison

    @property
    def factor(self) -> float:
        """The factor of predictions: see `MemoryModel.factor`."""
        return self._correction.factor

    def skip_step(self, measured: int) -> bool:
        """Count a step without a prediction, if a prediction would not raise the correction. Returns False, and counts
        nothing, if the step must be recorded. Its prediction must be at least that of the step recorded last."""
        is_due = (self._steps + 1) % _RECORD_EVERY == 0
        if is_due or measured > self.factor * max(self._last_predicted, _NOISE_BYTES):
            return False
        self._steps += 1
        self._max_measured = max(self._max_measured, measured)
        return True

    def record_step(self, predicted: int, measured: int) -> bool:
        """Record the predicted and measured bytes of a step. Returns True if predictions rise at once, because the step
        took more than predicted for it and for the one recorded last: rows that have left are still in the peak."""
        self._steps += 1
        self._max_measured = max(self._max_measured, measured)
        before = self.factor
        self._correction = self._correction.exceeded(max(predicted, self._last_predicted), measured)
        self._max_predicted = max(self._max_predicted, predicted)
        self._last_predicted = predicted
        return self.factor != before

    def compare(self) -> tuple[int, int] | None:
        """Return the largest predicted bytes, corrected, and the largest measured bytes of the last `_CALIBRATE_EVERY`
        steps, and move predictions towards what was measured. Returns None in the steps between."""
        predicted, measured = self._max_predicted, self._max_measured
        if self._steps % _CALIBRATE_EVERY:
            return None
        self._max_predicted = self._max_measured = 0
        if not predicted:
            return None
        corrected = round(self.factor * predicted)
        self._correction = self._correction.observe(predicted, measured)
        return corrected, measured
