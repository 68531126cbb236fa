"""Two models share a folder whose files are damaged, swapped and deleted while rows are answered: no token changes."""

import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from mlx.utils import tree_map

from tests.engine.prefix.test_disk import ANSWER, Worker, settled, settled_writes
from tests.engine.tiny import FAMILIES, alone, build, model_of, prompt
from tests.selection import examples
from worker.engine.model.load import Model
from worker.prefix_store.folder import _CountingFile
from worker.prefix_store.names import parse_name

QUOTA = 400_000  # bytes; a prompt takes 40,000 to 200,000
SYSTEM = prompt(40, 5)
_FIRST = SYSTEM + prompt(100, 1)
PROMPTS = [_FIRST, _FIRST + prompt(30, 2), SYSTEM + prompt(60, 3), prompt(150, 4)]

MODELS = st.sampled_from([0, 1])
SHARE = st.floats(0, 1)
TOKENS = st.sampled_from(PROMPTS)


@cache
def twins(family: str) -> tuple[Model, Model]:
    """Return two models of one shape."""
    models = []
    for number in range(2):
        network = build(FAMILIES[family])
        network.update(tree_map(lambda weight, by=number: mx.roll(weight, by), network.parameters()))
        models.append(model_of(network, {**FAMILIES[family], "model_type": f"{family} {number}"}))
    return models[0], models[1]


@cache
def computed(family: str, number: int, tokens: tuple[int, ...]) -> list[int]:
    """Return the answer of one of the two models without a cache."""
    return alone(twins(family)[number].network, tokens, ANSWER)


class FaultMachine(RuleBasedStateMachine):
    """Each action may happen while a row waits for its prefix. Afterwards each model answers a prompt."""

    @initialize(family=st.sampled_from(["llama", "gemma3", "qwen3_5"]), key=st.sampled_from([None, bytes(32)]))
    def open(self, family: str, key: bytes | None) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("worker.engine.prefill.queue.load_limit_s", lambda *_, **__: 60.0)
        self.patch.setattr("worker.prefix_store.writer._RESCAN_S", 0.05)
        self.patch.setattr("worker.prefix_store.writer._PAUSE_S", 0.0)
        self.patch.setattr(_CountingFile, "write", self.counted(_CountingFile.write))
        self.free_bytes: int | None = None  # on the disk; None: enough
        self.folder = Path(mkdtemp(prefix="sluice-faults-")) / "prefixes"
        self.family, self.key = family, key
        self.runs = [self.opened(0), self.opened(1)]

    def counted(self, write: Callable[..., int]) -> Callable[..., int]:
        def counting(file: Any, data: Any) -> int:
            if self.free_bytes is not None:
                self.free_bytes -= len(data)
                if self.free_bytes < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
            return write(file, data)

        return counting

    def opened(self, number: int) -> Worker:
        return Worker(
            self.family, self.folder, opened=twins(self.family)[number], max_bytes=QUOTA, key=self.key, step_s=10.0
        )

    def teardown(self) -> None:
        if not hasattr(self, "runs"):
            return
        try:
            for run in self.runs:
                run.close()
        finally:
            self.patch.undo()
            shutil.rmtree(self.folder.parent)

    def files(self) -> list[Path]:
        """Return the files of prefixes, once nothing waits to be written."""
        for run in self.runs:
            settled_writes(run)
        return sorted(self.folder.glob("*.safetensors"))

    def one_file(self, share: float) -> Path | None:
        """Return the file at this share of all files; None if there is none."""
        files = self.files()
        return files[min(int(share * len(files)), len(files) - 1)] if files else None

    def after(self, action: Callable[[], object], tokens: tuple[int, ...], waiting: bool) -> None:
        """Act, if `waiting` while each model has begun with a prompt, and then let each answer it."""
        ids = [f"row {len(run.generated)}" for run in self.runs]
        for run, id in zip(self.runs, ids, strict=True):
            if waiting:
                run.add(id, tokens, max_tokens=ANSWER, boundaries=(len(SYSTEM),))
                run.step()
        action()
        for run, id in zip(self.runs, ids, strict=True):
            if not waiting:
                run.add(id, tokens, max_tokens=ANSWER, boundaries=(len(SYSTEM),))
            while len(run.engine):
                run.step()
        for number, (run, id) in enumerate(zip(self.runs, ids, strict=True)):
            assert run.generated[id] == computed(self.family, number, tokens)
        assert sum(sizes := sizes_of(self.folder)) <= QUOTA + max(sizes, default=0)

    @rule(tokens=TOKENS, waiting=st.booleans())
    def evict(self, tokens: tuple[int, ...], waiting: bool) -> None:
        self.after(self.evict_all, tokens, waiting)

    def evict_all(self) -> None:
        """Move the prefixes of both models to disk."""
        for run in self.runs:
            run.engine._caches.set_limit(0)
            settled(run)
            run.engine._caches.set_limit(10**9)

    @rule(number=MODELS, tokens=TOKENS)
    def restart(self, number: int, tokens: tuple[int, ...]) -> None:
        self.runs[number].close()
        self.runs[number] = self.opened(number)
        self.after(lambda: None, tokens, waiting=False)

    @rule(which=SHARE, left=SHARE, tokens=TOKENS, waiting=st.booleans())
    def truncate_a_file(self, which: float, left: float, tokens: tuple[int, ...], waiting: bool) -> None:
        def truncate() -> None:
            if file := self.one_file(which):
                with suppress(FileNotFoundError):  # the store has just removed it
                    os.truncate(file, int(left * file.stat().st_size))

        self.evict_all()  # else the files are not read
        self.after(truncate, tokens, waiting)

    @rule(which=SHARE, place=SHARE, bit=st.integers(0, 7), tokens=TOKENS, waiting=st.booleans())
    def flip_a_bit(self, which: float, place: float, bit: int, tokens: tuple[int, ...], waiting: bool) -> None:
        def flip() -> None:
            if file := self.one_file(which):
                content = bytearray(file.read_bytes())
                content[min(int(place * len(content)), len(content) - 1)] ^= 1 << bit
                file.write_bytes(content)

        self.evict_all()  # else the files are not read
        self.after(flip, tokens, waiting)

    @rule(tokens=TOKENS, waiting=st.booleans())
    def swap_files(self, tokens: tuple[int, ...], waiting: bool) -> None:
        """Exchange the files of the two models that hold the same positions, often of the same tokens."""

        def swap() -> None:
            alike = defaultdict[tuple[int, int, bool], list[Path]](list)
            for file in self.files():
                if name := parse_name(file.name):
                    alike[name.start, name.end, name.has_state].append(file)
            for first, *others in alike.values():
                if others:
                    first.rename(self.folder / "aside")
                    others[-1].rename(first)
                    (self.folder / "aside").rename(others[-1])

        self.evict_all()  # else the files are not read
        self.after(swap, tokens, waiting)

    @rule(tokens=TOKENS, waiting=st.booleans())
    def delete_the_folder(self, tokens: tuple[int, ...], waiting: bool) -> None:
        def delete() -> None:
            self.files()
            shutil.rmtree(self.folder, ignore_errors=True)

        self.evict_all()  # else the files are not read
        self.after(delete, tokens, waiting)

    @rule(free_bytes=st.sampled_from([None, None, 0, 100_000]), tokens=TOKENS, waiting=st.booleans())
    def fill_the_disk(self, free_bytes: int | None, tokens: tuple[int, ...], waiting: bool) -> None:
        def fill() -> None:
            self.free_bytes = free_bytes

        self.after(fill, tokens, waiting)


def sizes_of(folder: Path) -> list[int]:
    """Return the bytes of each file, the unfinished ones included. Files may come and go meanwhile."""
    sizes = []
    for file in folder.glob("*"):
        with suppress(FileNotFoundError):
            sizes.append(file.stat().st_size)
    return sizes


TestFaults = FaultMachine.TestCase
TestFaults.settings = settings(max_examples=examples(40, by_default=2), stateful_step_count=15, deadline=None)
