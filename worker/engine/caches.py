"""What is kept for those who come later: prefixes, those of a draft model, and the features of images."""

from collections.abc import Iterable

from worker.engine.encoding import FeatureCache
from worker.engine.model import Model
from worker.engine.prefix import PrefixCache
from worker.engine.row import Row
from worker.engine.scoring import Draft
from worker.schedule.sequence import Sequence

# Of all bytes, one part in so many.
_DRAFT_SHARE = 4
_FEATURES_SHARE = 4


class Caches:
    def __init__(self, model: Model, most: int) -> None:
        """`most`: bytes, for all of them."""
        draft_bytes = most // _DRAFT_SHARE if model.draft else 0
        features_bytes = most // _FEATURES_SHARE if model.vision else 0
        self.prefix = PrefixCache(model.network, most - draft_bytes - features_bytes) if most > 0 else None
        self.draft = _draft_of(model, draft_bytes)
        self.features = FeatureCache(features_bytes) if model.vision else None
        caches = (self.prefix, self.draft.prefix if self.draft else None, self.features)
        self._all = [cache for cache in caches if cache is not None]

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._all)

    @property
    def evicted(self) -> int:
        """Runs, states and images that made room so far."""
        return sum(cache.evicted for cache in self._all)

    def use(self, coming: Iterable[Sequence]) -> None:
        """What these begin with goes last, and so do their images."""
        for sequence in coming:
            if self.prefix:
                self.prefix.use(sequence.space, sequence.keys(sequence.known))
            if self.features:
                for picture in sequence.pictures:
                    self.features.find(sequence.space, picture.digest)

    def make_room(self, spare: int) -> None:
        """So many bytes are there: what the draft's prefixes and images take is not there for the model's prefixes."""
        for cache in reversed(self._all):
            cache.make_room(spare)
            spare -= cache.nbytes

    def forget_unsound(self, row: Row) -> None:
        """Whatever gave it no numbers."""
        if self.prefix:
            self.prefix.forget_unsound(row.sequence.space, row.fed())
        if self.features:
            self.features.forget_unsound(row.sequence.space, row.sequence.pictures)


def _draft_of(model: Model, prefix_bytes: int) -> Draft | None:
    if model.draft is None:
        return None
    unread = model.vision.family.placeholder if model.vision else None
    return Draft(model.draft.network, prefix_bytes, model.draft.context, unread)
