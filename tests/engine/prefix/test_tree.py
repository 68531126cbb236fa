from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.selection import examples
from worker.engine.prefix import tree as prefix
from worker.engine.prefix.tree import MAX_SEGMENT_TOKENS, Evicted, Found, Node, PrefixTree, checkpoint_positions

Tokens = tuple[int, ...]
STATE_BYTES = 7


@dataclass(frozen=True)
class Spelt:
    """A run that remembers its tokens; a byte each."""

    tokens: Tokens

    @property
    def nbytes(self) -> int:
        return len(self.tokens)

    def split(self, at: int) -> tuple[Self, Self]:
        assert 0 < at < len(self.tokens)
        return type(self)(self.tokens[:at]), type(self)(self.tokens[at:])


@dataclass(frozen=True)
class Whole:
    """A state that remembers all its tokens, and shortens while they are fewer than the window."""

    tokens: Tokens
    window: int = 0

    @property
    def nbytes(self) -> int:
        return STATE_BYTES

    @property
    def trimmable(self) -> bool:
        return len(self.tokens) < self.window


Spelling = PrefixTree[Spelt, Whole]


def add(tree: Spelling, tokens: Tokens, *, space: str = "", state: bool = False, window: int = 0) -> None:
    tree.insert(space, tokens, lambda start, end: Spelt(tokens[start:end]), Whole(tokens, window) if state else None)


def plain(*kept: Tokens) -> Spelling:
    tree = Spelling(stateful=False)
    for tokens in kept:
        add(tree, tokens)
    return tree


def stateful(*kept: Tokens, window: int = 0) -> Spelling:
    tree = Spelling(stateful=True)
    for tokens in kept:
        add(tree, tokens, state=True, window=window)
    return tree


def spelt(found: Found[Spelt, Whole]) -> Tokens:
    """Return the tokens that the segments would restore."""
    runs = [node.segment for node in found.nodes]
    assert None not in runs
    return tuple(token for run in runs if run for token in run.tokens)[: found.length]


def held(tree: Spelling) -> list[Node[Spelt, Whole]]:
    nodes = list(tree._roots.values())
    for node in nodes:
        nodes += node.children.values()
    return [node for node in nodes if node.parent]


def ends(tree: Spelling) -> list[int]:
    return sorted(node.end for node in held(tree))


def used(tree: Spelling, tokens: Tokens) -> None:
    tree.touch(tree.find("", tokens))


ABC, ABD, XYZ = (1, 2, 3), (1, 2, 4), (7, 8, 9)


def test_without_snapshots_any_part_of_a_prefix_is_found() -> None:
    tree = plain((1, 2, 3, 4, 5))
    asked = [(1,), (1, 2, 3), (1, 2, 3, 9), (1, 2, 3, 4, 5, 6)]
    assert [tree.find("", tokens).length for tokens in asked] == [1, 3, 3, 5]
    assert spelt(tree.find("", (1, 2, 3, 9))) == (1, 2, 3)


def test_with_snapshots_a_prefix_is_found_only_up_to_one() -> None:
    tree = stateful((1, 2, 3, 4, 5, 6), (1, 2, 3))
    assert [tree.find("", tuple(range(1, 1 + count))).length for count in range(1, 8)] == [0, 0, 3, 3, 3, 6, 6]
    found = tree.find("", (1, 2, 3, 4, 9))
    assert found.holder
    assert found.holder.snapshot == Whole((1, 2, 3))
    assert spelt(found) == (1, 2, 3)


@pytest.mark.parametrize("window", [0, 99])
def test_what_is_known_ends_where_the_tokens_part_from_all_others(window: int) -> None:
    tree = stateful((1, 2, 3, 4, 5), (1, 2, 3, 8), window=window)
    asked = {(1, 2, 3, 4, 9): 4, (1, 2, 9): 2, (1, 2, 3, 8, 9): 4, (9,): 0}
    assert {tokens: tree.find("", tokens).known for tokens in asked} == asked
    assert plain(ABC).find("", (1, 2, 9)).known == 2


def test_a_node_that_was_handed_over_is_not_if_it_is_split_or_gets_a_snapshot() -> None:
    tree = plain((1, 2, 3, 4))
    (node,) = held(tree)
    tree.mark_handed_over(node)
    add(tree, (1, 2, 9))
    assert {each.end: each.handed_over for each in held(tree)} == {2: False, 3: False, 4: True}
    tree = stateful((1, 2, 3, 4), (1, 2, 9))
    (upper,) = (each for each in held(tree) if each.end == 2)
    tree.mark_handed_over(upper)
    add(tree, (1, 2), state=True)
    assert not upper.handed_over


def test_namespaces_share_nothing() -> None:
    tree = plain(ABC)
    add(tree, ABD, space="another's")
    assert tree.find("another's", ABC).length == 2
    assert tree.find("third", ABC).length == 0
    assert tree.nbytes == 6


def test_shared_prefix_is_stored_once() -> None:
    tree = plain(ABC, ABD)
    assert (tree.nbytes, ends(tree)) == (4, [2, 3, 3])
    assert spelt(tree.find("", ABC)) == ABC
    assert spelt(tree.find("", ABD)) == ABD


def test_only_missing_segments_are_copied() -> None:
    tree, asked = plain(ABC), list[tuple[int, int]]()

    def take(start: int, end: int) -> Spelt:
        asked.append((start, end))
        return Spelt((1, 2, 3, 4, 5)[start:end])

    tree.insert("", (1, 2, 3, 4, 5), take)
    tree.insert("", (1, 2, 3, 4), take)
    assert asked == [(3, 5)]


def test_snapshot_within_a_segment_splits_it() -> None:
    tree = stateful((1, 2, 3, 4, 5))
    add(tree, (1, 2, 3), state=True)
    assert (ends(tree), tree.nbytes) == ([3, 5], 5 + 2 * STATE_BYTES)
    assert spelt(tree.find("", (1, 2, 3, 4, 5))) == (1, 2, 3, 4, 5)


def test_long_insertion_is_divided_into_segments() -> None:
    tokens = tuple(range(2 * MAX_SEGMENT_TOKENS + 10))
    tree = plain(tokens)
    assert ends(tree) == [MAX_SEGMENT_TOKENS, 2 * MAX_SEGMENT_TOKENS, len(tokens)]
    assert spelt(tree.find("", tokens)) == tokens
    assert tree.find("", tokens[: MAX_SEGMENT_TOKENS + 5]).length == MAX_SEGMENT_TOKENS + 5


def test_trimmable_snapshot_further_on_serves_a_shorter_prefix() -> None:
    tree = stateful((1, 2, 3, 4, 5), window=6)
    found = tree.find("", (1, 2, 3, 9))
    assert found.holder
    assert (found.length, found.holder.end) == (3, 5)
    assert spelt(found) == (1, 2, 3)


def test_untrimmable_snapshot_serves_only_its_own_length() -> None:
    tree = stateful((1, 2, 3, 4, 5), window=5)
    assert tree.find("", (1, 2, 3, 9)).length == 0
    assert tree.find("", (1, 2, 3, 4, 5, 6)).length == 5


def test_trimmable_snapshot_serves_a_prompt_that_diverges_from_an_untrimmable_one() -> None:
    tree = stateful((1, 2, 3, 4, 5), (1, 2, 6), window=4)
    assert tree.find("", (1, 2, 3, 9)).length == 2


def test_find_handles_any_number_of_later_turns() -> None:
    turns = 1200
    tree = stateful(*(tuple(range(end)) for end in range(2, turns, 2)))
    used(tree, tuple(range(turns)))
    while len([node for node in held(tree) if node.snapshot]) > 1:
        tree.shrink(tree.nbytes - 1)
    assert tree.find("", tuple(range(turns))).length == turns - 2
    assert tree.find("", (*range(5), -1)).length == 0


def test_the_least_recently_used_goes_first() -> None:
    tree = plain(ABC, XYZ)
    used(tree, ABC)
    tree.shrink(5)
    assert (tree.find("", ABC).length, tree.find("", XYZ).length) == (3, 0)


def test_find_does_not_count_as_use() -> None:
    tree = plain(ABC, XYZ)
    tree.find("", ABC)
    tree.shrink(5)
    assert (tree.find("", ABC).length, tree.find("", XYZ).length) == (0, 3)


def test_leaves_are_evicted_before_shared_prefixes() -> None:
    tree = plain(ABC, ABD)
    tree.shrink(3)
    assert (tree.nbytes, tree.find("", ABC).length, tree.find("", ABD).length) == (3, 2, 3)
    tree.shrink(2)
    assert (tree.nbytes, tree.find("", ABD).length, tree.evicted) == (2, 2, 2)


def test_unused_snapshot_is_evicted_before_a_used_segment() -> None:
    tree = stateful((1, 2), (1, 2, 3, 4))
    used(tree, (1, 2, 3, 4))
    tree.shrink(tree.nbytes - 1)
    assert [tree.find("", tokens).length for tokens in [(1, 2, 3), (1, 2, 3, 4)]] == [0, 4]


def test_segments_that_lead_to_no_snapshot_are_evicted_with_it() -> None:
    tree = stateful((1, 2), (1, 2, 3, 4))
    used(tree, (1, 2))
    tree.shrink(tree.nbytes - 1)
    assert (tree.nbytes, ends(tree)) == (2 + STATE_BYTES, [2])


def test_evicted_data_is_returned_with_its_namespace_and_all_tokens_before_it() -> None:
    tree = plain(ABC, ABD)
    add(tree, XYZ, space="b")
    used(tree, ABC)
    shared, rest, other = Spelt((1, 2)), Spelt((4,)), Spelt(XYZ)
    first, second = tree.shrink(3)
    assert (first, first.tokens) == (Evicted("", (shared.tokens, rest.tokens), rest), ABD)
    assert second == Evicted("b", (XYZ,), other)


def test_evicted_snapshot_is_returned_before_the_segments_that_lead_to_it() -> None:
    tree = stateful((1, 2), (1, 2, 3, 4))
    used(tree, (1, 2))
    path = (1, 2), (3, 4)
    assert tree.shrink(tree.nbytes - 1) == [
        Evicted("", path, snapshot=Whole((1, 2, 3, 4))),
        Evicted("", path, segment=Spelt((3, 4))),
    ]


@pytest.mark.parametrize("empty", ["shrink", "discard"])
def test_emptied_namespace_leaves_nothing(empty: str) -> None:
    tree = stateful(ABC)
    if empty == "shrink":
        tree.shrink(0)
    else:
        tree.discard(held(tree)[0])
    assert (tree.nbytes, tree._roots, [*tree._order]) == (0, {}, [])


def test_node_is_discarded_with_its_descendants() -> None:
    tree = plain(ABC, ABD, (5, 6))
    tree.discard(tree.walk("", (1, 2))[0][0])
    assert (tree.nbytes, tree.find("", ABC).length, tree.find("", (5, 6)).length) == (2, 0, 2)


def test_ancestors_useless_without_a_discarded_node_are_removed() -> None:
    tree = stateful(ABC, ABD)
    for tokens in ABC, ABD:
        tree.discard(tree.walk("", tokens)[0][-1])
    assert (tree.nbytes, held(tree)) == (0, [])


def test_version_changes_when_more_may_be_found() -> None:
    tree = plain()
    before = tree.version
    add(tree, ABC)
    assert tree.version != before


def test_failed_copy_leaves_the_tree_unchanged() -> None:
    tree = plain(ABC)

    def fails(start: int, end: int) -> Spelt:
        raise MemoryError

    with pytest.raises(MemoryError):
        tree.insert("", (1, 2, 9, 9), fails)
    assert (tree.nbytes, ends(tree)) == (3, [3])
    assert spelt(tree.find("", ABC)) == ABC


LENGTHS = st.integers(1, 9000)
PLACES = st.lists(st.integers(-5, 9000), max_size=12).map(tuple)
CLOSE, FREELY, GRID = 16, 4, 2048


def test_checkpoints_are_the_likeliest_boundaries_the_end_and_a_grid() -> None:
    assert checkpoint_positions((500, 100), 900, GRID) == (100, 500, 900)
    assert checkpoint_positions((), 5000, GRID) == (2048, 5000)  # 4096 is near enough to the end
    assert checkpoint_positions((), 7000, GRID) == (2048, 4096, 7000)
    assert checkpoint_positions((), 2048, GRID) == (2048,)


def test_of_two_close_positions_the_first_is_chosen() -> None:
    assert checkpoint_positions((100, 115, 84, 85), 300, GRID) == (84, 100, 300)
    assert checkpoint_positions((290,), 300, GRID) == (290,)
    assert checkpoint_positions((3, 15), 15, GRID) == ()
    assert checkpoint_positions((16,), 32, GRID) == (16, 32)


def test_less_likely_boundary_is_chosen_if_far_from_all_others() -> None:
    freely = (100, 200, 300, 400)
    assert checkpoint_positions((*freely, 500, 1424, 1900), 4000, GRID) == (*freely, 1424, 4000)


def test_a_prompt_is_cut_where_it_parts_from_others_whatever_its_boundaries() -> None:
    boundaries = 100, 200, 300, 400
    assert checkpoint_positions(boundaries, 900, GRID, (450, 600)) == (*boundaries, 450, 600, 900)
    assert checkpoint_positions(boundaries, 900, GRID, (0, 110, 895, 1000)) == (*boundaries, 895)


@given(PLACES, PLACES, LENGTHS)
def test_little_is_recomputed_after_a_parting(boundaries: Tokens, partings: Tokens, tokens: int) -> None:
    found = checkpoint_positions(boundaries, tokens, GRID, partings)
    for at in partings:
        assert not CLOSE <= at <= tokens or any(at - CLOSE < cut <= at for cut in found)


@given(PLACES, LENGTHS)
def test_cuts_are_in_order_and_within_the_prompt(boundaries: Tokens, tokens: int) -> None:
    found = checkpoint_positions(boundaries, tokens, GRID)
    assert list(found) == sorted(set(found))
    assert all(CLOSE <= at <= tokens for at in found)
    assert all(at in (*boundaries, tokens) or at % GRID == 0 for at in found)
    assert all(b - a >= CLOSE for a, b in pairwise(found))


@given(PLACES, LENGTHS)
def test_little_is_recomputed_after_the_likeliest_boundaries_and_the_end(boundaries: Tokens, tokens: int) -> None:
    found = checkpoint_positions(boundaries, tokens, GRID)
    for at in [*boundaries[:FREELY], tokens]:
        if CLOSE <= at <= tokens:
            assert any(at - CLOSE < cut <= at for cut in found)


@given(PLACES, st.integers(1, 60_000))
def test_no_stretch_of_a_long_prompt_is_without_a_checkpoint(boundaries: Tokens, tokens: int) -> None:
    found = (0, *checkpoint_positions(boundaries, tokens, GRID))
    assert max(b - a for a, b in zip(found, (*found[1:], tokens), strict=True)) < 2 * GRID


@given(st.lists(st.integers(1, 40_000), max_size=200).map(tuple), st.integers(1, 40_000))
def test_number_of_checkpoints_is_bounded_for_any_boundaries(boundaries: Tokens, tokens: int) -> None:
    assert len(checkpoint_positions(boundaries, tokens, GRID)) <= FREELY + 1 + tokens // (GRID // 2)


SPACES = st.sampled_from(["", "b"])
WORDS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


def test_marks_are_lost_with_the_nodes_that_they_end_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "MAX_SEGMENT_TOKENS", 2)
    tree = plain((1, 2, 3, 4, 5, 6))
    tree.mark("", (1, 2, 3, 4, 5, 6, 7), [("one", 1), ("two", 2), ("three", 3), ("six", 6), ("seven", 7)])
    assert (tree.num_marks, tree.take_lost()) == (4, (("seven",), False))
    add(tree, (1, 2, 3, 9))  # splits the node with "three" at its end
    assert (tree.num_marks, tree.take_lost()) == (4, ((), False))
    used(tree, (1, 2, 3, 9))
    tree.shrink(4)
    assert (tree.num_marks, tree.take_lost()) == (3, (("six",), False))
    tree.shrink(0)
    lost, emptied = tree.take_lost()
    assert (tree.num_marks, sorted(lost), emptied) == (0, ["one", "three", "two"], True)
    assert tree.take_lost() == ((), False)


def test_a_mark_is_held_once_and_belongs_to_a_namespace() -> None:
    tree = plain(ABC)
    tree.mark("", ABC, [("a", 2)])
    tree.mark("", ABC, [("a", 3)])
    tree.mark("b", ABC, [("a", 2), ("b", 2)])  # nothing is held there, but "a" elsewhere
    assert (tree.num_marks, tree.take_lost()) == (1, (("b",), False))


def test_a_further_mark_of_a_node_copies_no_others_and_a_split_adds_none() -> None:
    tree = plain((1, 2, 3, 4))
    add(tree, (1, 2, 5))  # splits it
    (upper, lower), _ = tree.walk("", (1, 2, 3, 4))
    assert (upper.marks, lower.marks) == (None, None)
    tree.mark("", (1, 2), [("a", 1)])
    held = upper.marks
    tree.mark("", (1, 2), [("b", 2)])
    assert upper.marks is held == {"a": 1, "b": 2}


def test_the_oldest_marks_beyond_the_limit_count_as_lost() -> None:
    tree = Spelling(stateful=False, max_marks=3)
    add(tree, ABC)
    for name in "abcde":
        tree.mark("", ABC, [(name, 2)])
        tree.mark("", ABC, [("a", 2)])  # used again
    assert (tree.num_marks, tree.take_lost()[0]) == (3, ("b", "c"))
    for name in map(str, range(100)):
        tree.mark("c", ABC, [(name, 2)])
    assert len(tree.take_lost()[0]) == 3


class Life(RuleBasedStateMachine):
    """Beside a dict of what was added."""

    @initialize(
        window=st.sampled_from([None, 0, 4, 99]),
        longest=st.sampled_from([1, 3, MAX_SEGMENT_TOKENS]),
        small=st.booleans(),
    )
    def plant(self, window: int | None, longest: int, small: bool) -> None:
        """`window`: in which states shorten; None is a tree without them. A `small` one has to let go."""
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prefix, "MAX_SEGMENT_TOKENS", longest)
        self.stateful, self.window, self.small = window is not None, window or 0, small
        self.tree = Spelling(stateful=self.stateful)
        self.added: dict[str, set[Tokens]] = {"": set(), "b": set()}
        self.whole = True  # nothing was evicted yet
        self.marked: dict[str, tuple[str, Tokens]] = {}  # prefixes by mark

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    def possible(self, space: str, tokens: Tokens) -> Iterator[int]:
        for kept in self.added[space]:
            alike = next((i for i, (a, b) in enumerate(zip(kept, tokens, strict=False)) if a != b), len(kept))
            alike = min(alike, len(tokens))
            if not self.stateful or alike == len(kept) or len(kept) < self.window:
                yield alike
        yield 0

    @rule(space=SPACES, tokens=WORDS)
    def keep(self, space: str, tokens: Tokens) -> None:
        before = self.tree.version
        add(self.tree, tokens, space=space, state=self.stateful, window=self.window)
        self.added[space].add(tokens)
        assert self.tree.version != before
        found = self.tree.find(space, tokens)
        assert found.length == len(tokens)

    @rule(space=SPACES, asked=st.lists(WORDS, min_size=1, max_size=8))
    def find(self, space: str, asked: list[Tokens]) -> None:
        for tokens in asked:
            self.look(space, tokens)

    def look(self, space: str, tokens: Tokens) -> None:
        found = self.tree.find(space, tokens)
        longest = max(self.possible(space, tokens))
        assert found.length == longest if self.whole else found.length <= longest
        assert spelt(found) == tokens[: found.length]
        assert bool(found.length) == bool(found.nodes)
        if self.stateful and found.length:
            assert found.holder
            state = found.holder.snapshot
            assert state
            assert len(state.tokens) == found.holder.end
            assert state.tokens[: found.length] == tokens[: found.length]
            assert state.trimmable or found.holder.end == found.length
        else:
            assert found.holder is None

    @rule(space=SPACES, tokens=WORDS)
    def mark(self, space: str, tokens: Tokens) -> None:
        marks = [(f"{space}:{tokens[:end]}", end) for end in range(1, len(tokens) + 1)]
        self.marked |= {name: (space, tokens[:end]) for name, end in marks}
        self.tree.mark(space, tokens, marks)

    @invariant()
    def no_mark_is_held_or_lost_wrongly(self) -> None:
        if hasattr(self, "tree"):
            for name in self.tree.take_lost()[0]:
                self.marked.pop(name, None)
            assert self.marked.keys() == self.tree._marked.keys()
            for space, tokens in self.marked.values():
                assert self.tree.walk(space, tokens)[1] == len(tokens)

    @rule(space=SPACES, tokens=WORDS)
    def use(self, space: str, tokens: Tokens) -> None:
        found = self.tree.find(space, tokens)
        self.tree.touch(found)
        if found.nodes:
            assert next(reversed(self.tree._order)) == (found.nodes[0], "segment")

    @precondition(lambda self: self.small)
    @rule(share=st.floats(0, 1))
    def shrink(self, share: float) -> None:
        limit, before = int(share * self.tree.nbytes), self.tree.nbytes
        evicted = self.tree.shrink(limit)
        assert self.tree.nbytes <= limit
        data = [each for node in evicted for each in (node.segment, node.snapshot) if each]
        assert self.tree.nbytes == before - sum(each.nbytes for each in data)
        for node in evicted:
            assert any(tokens[: len(node.tokens)] == node.tokens for tokens in self.added[node.namespace])
            assert node.segment is None or node.segment.tokens == node.path[-1]
            assert node.snapshot is None or node.snapshot.tokens == node.tokens
        assert all(root.children for root in self.tree._roots.values())
        self.whole &= self.tree.nbytes == before

    @precondition(lambda self: self.small and held(self.tree))
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(held(self.tree)))
        self.tree.discard(node)
        assert node not in held(self.tree)
        self.whole = False

    @invariant()
    def bytes_are_those_of_all_that_can_be_reached(self) -> None:
        kept = [each for node in held(self.tree) for each in (node.segment, node.snapshot) if each]
        assert self.tree.nbytes == sum(each.nbytes for each in kept)

    @invariant()
    def the_order_holds_just_what_can_be_reached(self) -> None:
        nodes = held(self.tree)
        there = {(id(node), "segment") for node in nodes} | {(id(node), "snapshot") for node in nodes if node.snapshot}
        assert {(id(node), what) for node, what in self.tree._order} == there

    @invariant()
    def whoever_begins_with_a_node_was_not_used_after_it(self) -> None:
        runs = [node for node, what in self.tree._order if what == "segment"]
        last = {id(node): at for at, node in enumerate(runs)}
        assert all(last[id(node)] < last[id(node.parent)] for node in runs if node.parent and node.parent.parent)
        assert not runs or not runs[0].children

    @invariant()
    def nodes_hang_where_their_tokens_say(self) -> None:
        for node in held(self.tree):
            assert node.parent
            assert node.segment
            assert node.parent.children[node.tokens[0]] is node
            assert node.tokens == node.segment.tokens
            assert node.end == node.parent.end + len(node.tokens)
            assert node.children or node.snapshot or not self.stateful


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("with_state", [False, True])
def test_nodes_to_keep_are_not_evicted_although_nothing_else_uses_them(with_state: bool) -> None:
    """The nodes below the kept one are used less recently: with the last of them, it would lead to no snapshot."""
    tree = stateful(ABC, ABD) if with_state else plain(ABC, ABD)
    path, _ = tree.walk("", (1, 2))
    used(tree, (1, 2, 9))
    tree.shrink(0, {*path})
    assert (tree.nbytes, ends(tree), tree.walk("", (1, 2, 9))[1]) == (2, [2], 2)
    tree.shrink(0)
    assert (tree.nbytes, ends(tree)) == (0, [])


def test_a_snapshot_of_a_node_to_keep_is_evicted() -> None:
    tree = stateful(ABC)
    path, _ = tree.walk("", ABC)
    assert tree.shrink(3, {*path}) == [Evicted("", (ABC,), snapshot=Whole(ABC))]
    assert ends(tree) == [3]
