"""Names of the files, and digests of tokens. A name has all that the index needs, so no file is opened at start."""

import copy
import hashlib
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

VERSION = 1  # of names and format; files of other versions are stale
_DIGEST_BYTES = 16
_PREFIX = "sluice-prefix-"
_PATTERN = re.compile(
    rf"{_PREFIX}v{VERSION}-([0-9a-f]{{32}})-([0-9a-f]{{32}})-([0-9a-f]{{32}})-(\d{{1,9}})-(\d{{1,9}})-(kv|state)\.safetensors"
)
LOCK = "sluice-prefix-lock"
WRITTEN = "sluice-prefix-written.json"  # bytes written today, by all processes
TEMPORARY = ".part"
_PIN = ".pin"
_MODEL = re.compile(rf"{_PREFIX}model-([0-9a-f]{{32}})\.json")
_HITS = re.compile(rf"{_PREFIX}hits-([0-9a-f]{{32}})\.json")
_MEMORY = re.compile(rf"{_PREFIX}memory-([0-9a-f]{{32}})-[0-9a-f]{{16}}\.json")
# The features of an image have a path of their own: this number plus the image's digest, once for each token of its
# span. No token id is as large, and the number that stands for an image in a prompt is negative.
IMAGE_FEATURES = 1 << 64
_BIG_TOKEN = (-(1 << 63)).to_bytes(8, "little", signed=True)  # announces a key of an image, which is a large number


@dataclass(frozen=True, slots=True)
class FileName:
    """Name of the file of a segment: tokens `start` to `end` (exclusive) of a prefix."""

    model: str  # digest of the model
    parent: str  # digest of the first `start` tokens
    digest: str  # digest of the first `end` tokens
    start: int
    end: int
    has_state: bool  # the file has the state after `end` tokens

    def __str__(self) -> str:
        kind = "state" if self.has_state else "kv"
        tokens = f"{self.start}-{self.end}"
        return f"{_PREFIX}v{VERSION}-{self.model}-{self.parent}-{self.digest}-{tokens}-{kind}.safetensors"

    def temporary(self, writer: str) -> str:
        """Return the name while the file is written. `writer`: differs for each attempt of each process."""
        return f"{self}.{writer}{TEMPORARY}"

    @property
    def segment(self) -> tuple[str, str]:
        """Digests of the model and of the tokens up to the end; files that replace each other have the same."""
        return self.model, self.digest

    @property
    def pin(self) -> str:
        """Name of the small file that keeps this one from being removed for space."""
        return pin_of(str(self))


def file_of_each_segment(names: Iterable[FileName]) -> dict[tuple[str, str], FileName]:
    """Return a file for each segment; of several, one with a state."""
    segments = defaultdict[tuple[str, str], list[FileName]](list)
    for name in names:
        segments[name.segment].append(name)
    return {segment: max(files, key=lambda name: (name.has_state, -name.start)) for segment, files in segments.items()}


def chain_to(name: FileName, files: Mapping[tuple[str, str], FileName]) -> Iterator[FileName]:
    """Yield the file and those before it, the last first. `files`: one of each segment."""
    current: FileName | None = name
    while current is not None:
        yield current
        previous = files.get((current.model, current.parent)) if current.start else None
        # Without the check of the positions, bad names could continue each other in a circle.
        current = previous if previous and previous.end == current.start else None


def parse_name(text: str) -> FileName | None:
    """Return the parsed name; None if it is not that of a file of this version."""
    if (match := _PATTERN.fullmatch(text)) is None:
        return None
    model, parent, digest, start, end, kind = match.groups()
    if int(start) >= int(end):
        return None
    return FileName(model, parent, digest, int(start), int(end), kind == "state")


def is_ours(text: str) -> bool:
    """Return True for a file that some version of the store has written, pins and unfinished files included."""
    return text.startswith(_PREFIX)


def is_pin(text: str) -> bool:
    """Return True for the name of a pin."""
    return is_ours(text) and text.endswith(_PIN)


def pin_of(name: str) -> str:
    """Return the name of the pin of a file."""
    return f"{name}{_PIN}"


def pinned_name(pin: str) -> str:
    """Return the name of the file that a pin belongs to."""
    return pin.removesuffix(_PIN)


def model_record(model: str) -> str:
    """Return the name of the file that says of which model a digest is."""
    return f"{_PREFIX}model-{model}.json"


def recorded_model(text: str) -> str | None:
    """Return the digest that a file of `model_record` is about; None for the name of another file."""
    match = _MODEL.fullmatch(text)
    return match[1] if match else None


def hits_record(model: str) -> str:
    """Return the name of the file that counts how often files of a model are read. `model`: its digest."""
    return f"{_PREFIX}hits-{model}.json"


def counted_model(text: str) -> str | None:
    """Return the digest that a file of `hits_record` is about; None for the name of another file."""
    match = _HITS.fullmatch(text)
    return match[1] if match else None


def memory_record(model: str, worker: str) -> str:
    """Return the name of the file that says what a worker holds in memory. `worker`: 16 hexadecimal digits, which no
    other has."""
    return f"{_PREFIX}memory-{model}-{worker}.json"


def held_model(text: str) -> str | None:
    """Return the digest that a file of `memory_record` is about; None for the name of another file."""
    match = _MEMORY.fullmatch(text)
    return match[1] if match else None


def is_temporary_file(text: str) -> bool:
    """Return True for the name of a file that is being written, or whose writer has died."""
    return is_ours(text) and text.endswith(TEMPORARY)


def model_digest(fingerprint: str, key: bytes = b"") -> str:
    """Return the digest of a model's fingerprint. `key`: makes it differ from that of another key, and keeps it from
    being computed without the key."""
    return hashlib.blake2b(fingerprint.encode(), digest_size=_DIGEST_BYTES, key=key).hexdigest()


class TokenDigest:
    """Running digest of the tokens of one model and namespace. Depends on the tokens alone, not on their portions."""

    def __init__(self, model: str, namespace: str, key: bytes = b"") -> None:
        """`model`: digest of the model. `key`: see `model_digest`."""
        self._hash = hashlib.blake2b(f"{model}:{namespace}\0".encode(), digest_size=_DIGEST_BYTES, key=key)
        self.length = 0  # tokens so far

    def update(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self._hash.update(_packed(tokens))
        self.length += len(tokens)

    def hexdigest(self) -> str:
        """Return the digest of all tokens so far."""
        return self._hash.hexdigest()

    def copy(self) -> "TokenDigest":
        """Return a digest of the same tokens, to append others."""
        copied = copy.copy(self)
        copied._hash = self._hash.copy()
        return copied


def _packed(tokens: Sequence[int]) -> bytes:
    try:
        return array("q", tokens).tobytes()
    except OverflowError:  # keys of images, each many times
        return b"".join(_packed_one(token) * sum(1 for _ in run) for token, run in groupby(tokens))


def _packed_one(token: int) -> bytes:
    try:
        return array("q", [token]).tobytes()
    except OverflowError:
        number = token.to_bytes(token.bit_length() // 8 + 1, "little", signed=True)
        return _BIG_TOKEN + len(number).to_bytes(2, "little") + number
