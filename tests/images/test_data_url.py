import base64
from contextlib import suppress
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.errors import JobFailure
from worker.images.decode import read_data_url


@given(st.binary())
def test_base64_comes_out_as_it_went_in(data: bytes) -> None:
    assert read_data_url(b"data:image/png;base64," + base64.b64encode(data)) == ("image/png", data)


@given(st.binary())
def test_percent_encoding_comes_out_as_it_went_in(data: bytes) -> None:
    assert read_data_url(f"data:image/gif,{quote_from_bytes(data)}".encode()) == ("image/gif", data)


@given(st.binary())
def test_base64_may_be_percent_encoded_too(data: bytes) -> None:
    escaped = quote_from_bytes(base64.b64encode(data), safe="")
    assert read_data_url(f"data:image/png;base64,{escaped}".encode()) == ("image/png", data)


@given(st.binary())
def test_base64_may_be_broken_into_lines_and_lack_its_padding(data: bytes) -> None:
    lines = base64.encodebytes(data).replace(b"=", b"").replace(b"\n", b"\r\n")
    assert read_data_url(b"data:image/png;base64," + lines) == ("image/png", data)


@pytest.mark.parametrize(
    ("head", "media_type"),
    [
        ("DATA:image/PNG;BASE64", "image/png"),
        ("data:image/jpeg;charset=utf-8; base64", "image/jpeg"),
        ("data: image/webp ;base64", "image/webp"),
        ("data:;base64", ""),
    ],
)
def test_the_media_type_is_read_however_it_is_written(head: str, media_type: str) -> None:
    assert read_data_url(f"{head},AAEC".encode()) == (media_type, b"\0\1\2")


def test_without_the_word_base64_at_the_end_it_is_not_base64() -> None:
    assert read_data_url(b"data:image/png;base64;x=1,AAEC") == ("image/png", b"AAEC")
    assert read_data_url(b"data:base64,AAEC") == ("base64", b"AAEC")


@pytest.mark.parametrize("body", ["AAEC*", "AA=EC", "A", "AA-_", "AAEC,AAEC", "%41%4", "é"])
def test_base64_that_is_none_is_refused(body: str) -> None:
    with pytest.raises(JobFailure, match=r"^the data: URL is not valid base64 after its comma\.$"):
        read_data_url(f"data:image/png;base64,{body}".encode())


@pytest.mark.parametrize("url", ["data:", "data:image/png;base64", "data:iVBORw0KGgo="])
def test_a_url_without_a_comma_is_refused(url: str) -> None:
    with pytest.raises(JobFailure, match=r"^the data: URL has no comma before its data\.$"):
        read_data_url(url.encode())


@pytest.mark.parametrize("media_type", ["é", "x" * 101])
def test_a_media_type_that_is_none_is_refused(media_type: str) -> None:
    with pytest.raises(JobFailure, match=r"^the data: URL must begin with a media type, such as image/png\.$"):
        read_data_url(f"data:{media_type},x".encode())


@given(st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(url: bytes) -> None:
    with suppress(JobFailure):
        media_type, _ = read_data_url(b"data:" + url)
        assert media_type == media_type.lower()
