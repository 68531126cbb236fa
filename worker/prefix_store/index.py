"""The index of the places on disk: which file continues which prefix. Built from the files' names alone."""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from threading import Lock

from worker.prefix_store.names import FileName, TokenDigest


@dataclass(frozen=True, slots=True)
class Chain:
    """Files that together hold a prefix, from a position that the caller holds to the end of the prefix."""

    namespace: str
    tokens: tuple[int, ...]  # of the whole prefix
    files: tuple[FileName, ...]  # in order; each starts where the one before ends

    @property
    def start(self) -> int:
        """Position at which the first file starts."""
        return self.files[0].start


class Index:
    """Places of one model, by digest. For several threads: each call takes a lock for less than a millisecond, or for
    as long as it takes to hash a prompt."""

    def __init__(self, model: str) -> None:
        """`model`: digest of the model; names of others are ignored."""
        self._model = model
        self._lock = Lock()
        self._by_digest: defaultdict[str, set[FileName]] = defaultdict(set)
        self._by_parent: defaultdict[str, set[FileName]] = defaultdict(set)

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._by_digest.values()))

    def __contains__(self, name: FileName) -> bool:
        """True if this place is stored, with its state if the name says so, whatever the file's start."""
        with self._lock:
            return any(each.has_state >= name.has_state for each in self._by_digest.get(name.digest, ()))

    def add(self, name: FileName) -> None:
        """Add a file."""
        if name.model == self._model:
            with self._lock:
                self._by_digest[name.digest].add(name)
                self._by_parent[name.parent].add(name)

    def discard(self, name: FileName) -> None:
        """Remove a file, if it is there."""
        with self._lock:
            for names, key in ((self._by_digest, name.digest), (self._by_parent, name.parent)):
                if key in names:
                    names[key].discard(name)
                    if not names[key]:
                        del names[key]

    def replace(self, names: Iterable[FileName]) -> None:
        """Hold exactly these files from now on."""
        by_digest, by_parent = defaultdict[str, set[FileName]](set), defaultdict[str, set[FileName]](set)
        for name in names:
            if name.model == self._model:
                by_digest[name.digest].add(name)
                by_parent[name.parent].add(name)
        with self._lock:
            self._by_digest = by_digest
            self._by_parent = by_parent

    def find(
        self,
        namespace: str,
        tokens: tuple[int, ...],
        *,
        stateful: bool,
        held: Collection[int] = (),
        longer_than: int = 0,
    ) -> Chain | None:
        """Return the files that hold the longest prefix of the tokens; None if it is not longer than `longer_than`.
        `stateful`: the prefix has to end with a state. `held`: positions from which the caller can continue, besides 0,
        since it holds the KV of all tokens before them."""
        with self._lock:
            reached = self._reach(namespace, tokens, {0, *held})
        ends = [end for end, name in reached.items() if name and (name.has_state or not stateful)]
        if not ends or max(ends) <= longer_than:
            return None
        files = list[FileName]()
        name = reached[max(ends)]
        while name is not None:
            files.append(name)
            name = None if name.start in held else reached[name.start]
        return Chain(namespace, tokens[: max(ends)], tuple(reversed(files)))

    def _reach(self, namespace: str, tokens: tuple[int, ...], held: set[int]) -> dict[int, FileName | None]:
        """Return the positions that can be reached, each with the file that ends there; None for those held."""
        digest = TokenDigest(self._model, namespace)
        reached = dict[int, FileName | None]()
        queued = {position for position in held if position <= len(tokens)}
        positions = [*queued]
        heapq.heapify(positions)
        while positions:
            position = heapq.heappop(positions)
            digest.update(tokens[digest.length : position])
            here = digest.hexdigest()
            files = [name for name in self._by_digest.get(here, ()) if name.end == position and name.start in reached]
            if not files and position not in held:
                continue
            reached[position] = max(files, key=lambda name: (name.has_state, -name.start), default=None)
            ends = {name.end for name in self._by_parent.get(here, ()) if position < name.end <= len(tokens)}
            for end in ends - queued:
                heapq.heappush(positions, end)
            queued |= ends
        return reached
