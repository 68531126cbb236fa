"""The index of the segments on disk: which file continues which prefix. Built from the files' names and sizes alone."""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock

from worker.prefix_store.names import FileName, TokenDigest


@dataclass(frozen=True, slots=True)
class Chain:
    """Files that together hold a prefix, from a position that the caller holds to the end of the prefix."""

    namespace: str
    tokens: tuple[int, ...]  # of the whole prefix
    files: tuple[FileName, ...]  # in order; each starts where the one before ends
    sizes: tuple[int, ...]  # bytes of each file

    @property
    def start(self) -> int:
        """Position at which the first file starts."""
        return self.files[0].start

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes)

    def is_along(self, namespace: str, tokens: tuple[int, ...]) -> bool:
        """Return True if `Index.along` would return a file of it."""
        end = self.files[0].end
        return self.namespace == namespace and self.tokens[:end] == tokens[:end]


class Index:
    """Segments of one model, by digest. For several threads: each call takes a lock for less than a millisecond, or for
    as long as it takes to hash a prompt."""

    def __init__(self, model: str, key: bytes = b"") -> None:
        """`model`: digest of the model; names of others are ignored. `key`: of the digests of tokens."""
        self._model = model
        self._key = key
        self._lock = Lock()
        self._sizes: dict[FileName, int] = {}
        self._by_digest: defaultdict[str, set[FileName]] = defaultdict(set)
        self._by_parent: defaultdict[str, set[FileName]] = defaultdict(set)
        self._forgotten: list[tuple[str, tuple[int, ...]]] = []  # namespaces and tokens

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: FileName) -> bool:
        """True if this segment is stored, with its state if the name says so, whatever the file's start."""
        return self.stored(name) is not None

    def stored(self, name: FileName) -> FileName | None:
        """Return a file that serves in place of this one: it ends at the same tokens, has the state if the name says
        so, and continues a file that is stored unless it starts at the same token. None if there is none."""
        with self._lock:
            found = [each for each in self._by_digest.get(name.digest, ()) if each.has_state >= name.has_state]
            return next((each for each in found if each.start == name.start or self._is_reached(each)), None)

    def add(self, name: FileName, nbytes: int) -> None:
        """Add a file of `nbytes` bytes, unless it is forgotten."""
        if name.model == self._model:
            with self._lock:
                self._sizes[name] = nbytes
                self._by_digest[name.digest].add(name)
                self._by_parent[name.parent].add(name)
                self._discard_forgotten([name])

    def discard(self, name: FileName) -> None:
        """Remove a file, if it is there."""
        with self._lock:
            self._discard(name)

    def _discard(self, name: FileName) -> None:
        self._sizes.pop(name, None)
        for names, key in ((self._by_digest, name.digest), (self._by_parent, name.parent)):
            if key in names:
                names[key].discard(name)
                if not names[key]:
                    del names[key]

    def forget(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """Remove the files along these tokens, and leave out those that are added, until `end_forget`."""
        with self._lock:
            self._forgotten.append((namespace, tokens))
            self._discard_forgotten(self._sizes)

    def end_forget(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """End one call of `forget`: files along these tokens that are added from now on are held."""
        with self._lock:
            self._forgotten.remove((namespace, tokens))

    def _discard_forgotten(self, names: Iterable[FileName]) -> None:
        for namespace, tokens in self._forgotten:
            for name in self.along(namespace, tokens, names):
                self._discard(name)

    def replace(self, sizes: Mapping[FileName, int]) -> None:
        """Hold exactly these files from now on, with their bytes, except for those that are forgotten."""
        own = {name: nbytes for name, nbytes in sizes.items() if name.model == self._model}
        by_digest, by_parent = defaultdict[str, set[FileName]](set), defaultdict[str, set[FileName]](set)
        for name in own:
            by_digest[name.digest].add(name)
            by_parent[name.parent].add(name)
        with self._lock:
            self._sizes = own
            self._by_digest = by_digest
            self._by_parent = by_parent
            self._discard_forgotten(self._sizes)

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
            reached = self._reach(namespace, tokens, {0, *held}) if self._sizes else {}
            ends = [end for end, name in reached.items() if name and (name.has_state or not stateful)]
            if not ends or max(ends) <= longer_than:
                return None
            files = list[FileName]()
            name = reached[max(ends)]
            while name is not None:
                files.append(name)
                name = None if name.start in held else reached[name.start]
            files.reverse()
            return Chain(namespace, tokens[: max(ends)], tuple(files), tuple(self._sizes[each] for each in files))

    def known_end(self, namespace: str, tokens: tuple[int, ...], held: Collection[int]) -> int:
        """Return the last position along these tokens at which a file ends, with or without a state; 0 if none does.
        Files are compared as wholes, so a stored prompt may share more tokens. `held`: see `find`."""
        with self._lock:
            return max(self._reach(namespace, tokens, {0, *held})) if self._sizes else 0

    def along(self, namespace: str, tokens: tuple[int, ...], names: Iterable[FileName]) -> list[FileName]:
        """Return those of the files that end along these tokens, also if no chain of files reaches them."""
        digest = TokenDigest(self._model, namespace, self._key)
        by_end = defaultdict[int, list[FileName]](list)
        for name in names:
            if name.end <= len(tokens):
                by_end[name.end].append(name)
        found = list[FileName]()
        for end in sorted(by_end):
            digest.update(tokens[digest.length : end])
            here = digest.hexdigest()
            found += (name for name in by_end[end] if name.digest == here)
        return found

    def _is_reached(self, name: FileName) -> bool:
        """Return True if the files before this one are stored."""
        while name.start:
            # Without the check of the positions, bad names could continue each other in a circle.
            before = [each for each in self._by_digest.get(name.parent, ()) if each.end == name.start]
            if not before:
                return False
            name = min(before, key=lambda each: each.start)
        return True

    def _reach(self, namespace: str, tokens: tuple[int, ...], held: set[int]) -> dict[int, FileName | None]:
        """Return the positions that can be reached, each with the file that ends there; None for those held."""
        digest = TokenDigest(self._model, namespace, self._key)
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
