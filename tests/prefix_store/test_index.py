from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from worker.prefix_store.index import Index
from worker.prefix_store.listing import Listing
from worker.prefix_store.names import FileName, TokenDigest, parse_name

MODEL = "0" * 32
IMAGE = -(1 << 255)  # the key of an image


def digest(tokens: tuple[int, ...], namespace: str = "") -> str:
    running = TokenDigest(MODEL, namespace)
    running.update(tokens)
    return running.hexdigest()


def name(path: tuple[int, ...], start: int = 0, *, state: bool = False, namespace: str = "") -> FileName:
    return FileName(MODEL, digest(path[:start], namespace), digest(path, namespace), start, len(path), state)


def index(*names: FileName) -> Index:
    made = Index(MODEL)
    made.replace(dict.fromkeys(names, 1))
    return made


@given(st.lists(st.one_of(st.integers(-5, 5), st.just(IMAGE)), max_size=8), st.integers(0, 8))
def test_a_digest_depends_on_the_tokens_and_not_on_their_portions(tokens: list[int], at: int) -> None:
    running = TokenDigest(MODEL, "")
    running.update(tokens[:at])
    running.update(tokens[at:])
    assert running.hexdigest() == digest(tuple(tokens))


def test_a_name_is_read_as_it_was_written() -> None:
    for made in (name((1, 2, 3), 1), name((1, IMAGE), state=True)):
        assert parse_name(str(made)) == made
    assert parse_name("model.safetensors") is None
    assert parse_name(str(name((1,))).replace("-v1-", "-v2-")) is None


def test_a_name_without_tokens_is_not_one_of_ours() -> None:
    for start, end in ((5, 5), (6, 5), (0, 0)):
        assert parse_name(str(FileName(MODEL, "1" * 32, "1" * 32, start, end, False))) is None


def circle() -> tuple[FileName, FileName]:
    """Return two names that claim to continue each other."""
    one, other = "1" * 32, "2" * 32
    return FileName(MODEL, other, one, 5, 10, False), FileName(MODEL, one, other, 5, 10, False)


def test_a_search_ends_although_two_names_claim_to_continue_each_other() -> None:
    one, other = circle()
    assert index(one, other).stored(replace(one, start=3)) is None


def test_a_listing_ends_although_names_claim_to_continue_each_other(tmp_path: Path) -> None:
    one, other = circle()
    last = FileName(MODEL, one.digest, "3" * 32, 10, 12, False)
    for each in (one, other, last):
        (tmp_path / str(each)).touch()
    assert Listing(tmp_path).prefixes[0].complete is False


def test_files_after_a_gap_are_found_only_from_a_position_that_is_held() -> None:
    files = index(name((1, 2, 3), 2))
    assert files.find("", (1, 2, 3), stateful=False) is None
    found = files.find("", (1, 2, 3), stateful=False, held=[2])
    assert found is not None
    assert found.start == 2


def test_nothing_is_found_that_is_held_already() -> None:
    assert index(name((1, 2))).find("", (1, 2, 3), stateful=False, held=[2], longer_than=2) is None


def test_what_is_known_ends_with_a_file_whether_or_not_it_has_a_state() -> None:
    files = index(name((1, 2), state=True), name((1, 2, 3), 2), name((1, 2, 3, 4, 5), 3), name((9, 8), 1))
    asked = {(1, 2, 3, 4): 3, (1, 2, 3, 4, 5, 6): 5, (1, 9): 0, (9, 8): 0}
    assert {tokens: files.known_end("", tokens, ()) for tokens in asked} == asked
    assert files.known_end("", (9, 8), [1]) == 2
    assert files.known_end("b", (1, 2), ()) == 0


def test_a_prefix_is_not_found_from_another_namespace_or_model() -> None:
    files = index(name((1, 2), namespace="a"))
    assert files.find("b", (1, 2), stateful=False) is None
    assert files.find("a", (1, 2), stateful=False) is not None
    other = Index("1" * 32)
    other.replace({name((1, 2)): 1})
    assert len(other) == 0


def test_a_segment_counts_as_stored_only_with_its_state() -> None:
    files = index(name((1, 2)))
    assert name((1, 2)) in files
    assert name((1, 2), state=True) not in files
    files.add(name((1, 2), state=True), 1)
    assert name((1, 2)) in files
    files.discard(name((1, 2), state=True))
    assert name((1, 2), state=True) not in files


paths = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


@given(st.lists(st.tuples(paths, st.integers(0, 5), st.booleans())), paths, st.booleans())
def test_the_longest_chain_is_found(
    made: list[tuple[tuple[int, ...], int, bool]], tokens: tuple[int, ...], stateful: bool
) -> None:
    names = [name(path, start, state=state) for path, start, state in made if start < len(path)]
    reached = {0}
    usable = {0}
    for end in range(1, len(tokens) + 1):
        here = [each for each in names if each.digest == digest(tokens[:end]) and each.start in reached]
        if here:
            reached.add(end)
        if any(each.has_state or not stateful for each in here):
            usable.add(end)
    found = index(*names).find("", tokens, stateful=stateful)
    assert (len(found.tokens) if found else 0) == max(usable)
    if found:
        assert [each.start for each in found.files] == [0, *(each.end for each in found.files[:-1])]
        assert found.files[-1].has_state or not stateful


def test_a_chain_has_the_sizes_of_its_files() -> None:
    made = Index(MODEL)
    made.replace({name((1, 2)): 10})
    made.add(name((1, 2, 3), 2), 20)
    found = made.find("", (1, 2, 3), stateful=False)
    assert found is not None
    assert (found.sizes, found.nbytes) == ((10, 20), 30)


def test_files_along_tokens_are_named_even_if_no_chain_reaches_them() -> None:
    names = [name((1, 2)), name((1, 2, 3, 4), 3), name((1, 2, 9), 2), name((1, 2), namespace="a")]
    assert {*index().along("", (1, 2, 3, 4, 5), names)} == {name((1, 2)), name((1, 2, 3, 4), 3)}


def test_files_along_forgotten_tokens_are_left_out_until_that_ends() -> None:
    forgotten, other = name((1, 2)), name((1, 3))
    made = index(forgotten, other)
    made.forget("", (1, 2, 3))
    made.forget("", (1, 2, 3))
    assert (forgotten in made, other in made) == (False, True)
    for _ in range(2):
        made.add(forgotten, 1)
        assert forgotten not in made
        made.replace({forgotten: 1, other: 1})
        assert (forgotten in made, other in made) == (False, True)
        made.end_forget("", (1, 2, 3))
    made.add(forgotten, 1)
    assert forgotten in made
