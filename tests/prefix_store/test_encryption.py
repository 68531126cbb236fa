import base64
import json
import random
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.prefix_store.segments import MODEL, assert_right, content, files, read, segment, store, written
from tests.selection import examples
from worker.prefix_store import encryption as encryption_module
from worker.prefix_store.encryption import Encryption, decode_key
from worker.prefix_store.listing import Listing
from worker.prefix_store.names import TokenDigest, model_digest

KEY, OTHER = bytes(range(32)), bytes(32)
PATH = tuple(range(1000, 1100))


def test_an_encrypted_prefix_is_read_as_it_was_written(tmp_path: Path) -> None:
    written(tmp_path, segment(PATH[:40]), segment(PATH, 40, state=True, size=1_000_000), key=KEY)
    opened = store(tmp_path, key=KEY)
    chain = opened.find("", PATH, stateful=True)
    assert chain is not None
    segments = read(opened, chain)
    opened.close(5)
    assert len(segments) == 2
    assert_right(chain, segments)
    assert [each.header.shapes for each in segments] == [((4096,), (2, 1024), (0,)), ((1_000_000,), (2, 250_000), (0,))]
    assert [each.header.dtypes for each in segments] == [("U8", "BF16", "F32")] * 2


def test_sizes_are_those_that_the_quota_counts(tmp_path: Path) -> None:
    written(tmp_path, segment(PATH), key=KEY, max_bytes=10_000_000)
    size = files(tmp_path)[0].stat().st_size
    shutil.rmtree(tmp_path)
    written(tmp_path, segment(PATH), key=KEY, max_bytes=size)  # the lock's file is empty
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("key", [OTHER, None])
def test_another_key_finds_nothing_and_removes_nothing(tmp_path: Path, key: bytes | None) -> None:
    written(tmp_path, segment(PATH), key=KEY)
    opened = store(tmp_path, key=key)
    assert opened.find("", PATH, stateful=False) is None
    opened.close(5)
    assert len(files(tmp_path)) == 1


def test_a_file_that_is_not_encrypted_is_not_found_with_a_key(tmp_path: Path) -> None:
    written(tmp_path, segment(PATH))
    opened = store(tmp_path, key=KEY)
    assert opened.find("", PATH, stateful=False) is None
    opened.close(5)
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("key", [OTHER, None])
def test_content_of_another_key_under_a_name_of_ours_is_a_miss(tmp_path: Path, key: bytes | None) -> None:
    written(tmp_path / "one", segment(PATH), key=KEY)
    written(tmp_path / "other", segment(PATH), key=key)
    (name,) = files(tmp_path / "one")
    name.write_bytes(files(tmp_path / "other")[0].read_bytes())
    opened = store(tmp_path / "one", key=KEY)
    assert read(opened, opened.find("", PATH, stateful=False)) == ()
    opened.close(5)


def test_an_encrypted_file_shows_nothing_that_depends_on_the_prompt(tmp_path: Path) -> None:
    written(tmp_path, segment(PATH, namespace="acme"), key=KEY)
    (file,) = files(tmp_path)
    raw = file.read_bytes()
    assert content(PATH, 64) not in raw
    for private in (b"acme", b"1000, 1001", b'"kind"', b"BF16"):
        assert private not in raw
        assert private not in base64.b64decode(header_of(file)["encrypted"])
    guess = TokenDigest(model_digest(MODEL), "acme")
    guess.update(PATH)
    assert guess.hexdigest() not in file.name
    assert model_digest(MODEL) not in file.name


def test_equal_segments_are_encrypted_differently(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        written(tmp_path / folder, segment(PATH), key=KEY)
    one, other = files(tmp_path / "one")[0], files(tmp_path / "other")[0]
    assert one.name == other.name
    assert header_of(one)["salt"] != header_of(other)["salt"]
    assert one.read_bytes()[-1000:] != other.read_bytes()[-1000:]


def header_of(file: Path) -> dict[str, str]:
    """Return the metadata as the safetensors package reads them."""
    with safe_open(str(file), "numpy") as opened:
        metadata: dict[str, str] = opened.metadata()
        return metadata


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(100))
@given(seed=st.integers(0, 1 << 32))
def test_a_changed_file_is_a_miss_and_removed(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    shutil.rmtree(tmp_path)
    written(tmp_path, segment(PATH, size=512), key=KEY)
    (file,) = files(tmp_path)
    raw = bytearray(file.read_bytes())
    raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
    file.write_bytes(raw)
    opened = store(tmp_path, key=KEY)
    assert read(opened, opened.find("", PATH, stateful=False)) == ()
    opened.close(5)
    assert files(tmp_path) == []


def test_tensors_cannot_change_places(tmp_path: Path) -> None:
    """The first two have the same bytes, so with one nonce for all a swap would not be found."""
    written(tmp_path, segment(PATH), key=KEY)
    (file,) = files(tmp_path)
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    size = json.loads(raw[8:start])["000000"]["data_offsets"][1]
    first, second = raw[start : start + size], raw[start + size : start + 2 * size]
    assert first != second
    file.write_bytes(raw[:start] + second + first + raw[start + 2 * size :])
    opened = store(tmp_path, key=KEY)
    assert read(opened, opened.find("", PATH, stateful=False)) == ()
    opened.close(5)


def test_the_tenant_is_listed_with_the_key_only(tmp_path: Path) -> None:
    written(tmp_path, segment(PATH, namespace="acme"), key=KEY)
    for encryption, tenant in ((None, None), (Encryption(OTHER), None), (Encryption(KEY), "acme")):
        listing = Listing(tmp_path, encryption)
        (prefix,) = listing.prefixes
        assert (prefix.tokens, listing.tenant(prefix)) == (len(PATH), tenant)


def test_a_long_part_is_decrypted_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption_module, "CALL_BYTES", 1000)  # of the writer alone
    written(tmp_path, segment(PATH, size=600_000), key=KEY)
    opened = store(tmp_path, key=KEY)
    chain = opened.find("", PATH, stateful=False)
    assert chain is not None
    segments = read(opened, chain)
    opened.close(5)
    assert_right(chain, segments)
    assert len(segments) == 1


@pytest.mark.parametrize("text", ["", "abc", "A" * 43, base64.b64encode(bytes(31)).decode(), "ä" * 44])
def test_a_key_that_is_not_32_bytes_in_base64_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ValueError, match="32 bytes in base64") as raised:
        decode_key(text)
    assert not text or text not in str(raised.value)


def test_a_key_is_decoded() -> None:
    assert decode_key(base64.b64encode(KEY).decode()) == KEY


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(ImportError, match="cryptography"):
        Encryption(KEY)
