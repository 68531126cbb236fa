"""What a format allows has that format, by the rules of the documents that define it."""

import datetime
import ipaddress
import json

import idna
import pytest

from tests.text.grammar.schema.answers import answers, takes
from worker.errors import JobFailure
from worker.text.grammar.schema.formats import FORMATS, written_patterns

LONG = "a" * 63
EXAMPLES: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "2000-02-29", "2021-02-28", "2021-12-31"],
        ["2021-02-29", "2100-02-29", "0100-02-29", "0000-01-01", "2021-04-31", "2021-13-01", "21-01-01"],
    ),
    "time": (
        ["12:00:00Z", "23:59:60Z", "23:59:60.5+00:00", "08:30:06.283185123z", "00:00:00-23:59"],
        ["22:59:60Z", "23:58:60Z", "23:59:60+01:00", "24:00:00Z", "12:00:00", f"12:00:00.{'1' * 40}Z"],
    ),
    "date-time": (
        ["2024-02-29T12:00:00Z", "1998-12-31t23:59:60z", "1985-04-12T23:20:50.52-08:00"],
        ["2021-02-29T12:00:00Z", "1998-12-31T22:59:60Z", "2021-01-01 12:00:00Z", f"2021-01-01T00:00:00.{'1' * 40}Z"],
    ),
    "duration": (["P1Y2M3D", "PT36H", "P4W", "P1DT12H"], ["P", "PT", "P1", "P1D2H", "P1W2D", "P1YT", "PT1D"]),
    "hostname": (
        ["example.com", "a", "a-b.c1", "a--b", f"{LONG}.{LONG}.{LONG}.{'a' * 61}", "1.2"],
        [
            "", ".", "a.", "-a", "a-", "a_b", "a..b", LONG + "a", f"{LONG}.{LONG}.{LONG}.{'a' * 62}", "xn--X",
            "xn--hello-txk", "XN--aa---o47jg78q", "ab--c",
        ],
    ),
    "idn-hostname": (["example.com", "straße.de", "例え.テスト", "실례"], ["a_b", "〮실례", "xn--X", "a.", "Ä", "א׳ב"]),
    "email": (
        ["a@b.c", "te~st+x@example.com", f"{LONG}a@b", "a@[127.0.0.1]"],
        [f"{LONG}aa@b", "a@", "@b", ".a@b", "a.@b", "a..b@c", "a@-b", f"a@{LONG}a", "a@[300.0.0.1]", "a b@c"],
    ),
    "idn-email": (["실례@실례.테스트", "δοκιμή@example.com", "a@b"], ["실례", "@b", "a b@c", f"{LONG}aa@b"]),
    "ipv4": (["0.0.0.0", "192.168.1.255"], ["1.2.3", "256.0.0.1", "01.2.3.4", "1.2.3.4.5"]),
    "ipv6": (
        ["::", "::1", "1::", "::ffff:192.168.0.1", "1:2:3:4:5:6:7:8", "1::d6:192.168.0.1", "2001:db8::8"],
        [":", "12345::", "1:2:3:4:5:6:7:8:9", "1::2::3", "::1%eth0", "1:2:3:4:5:6:7", "::256.0.0.1"],
    ),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa"]),
    "uri": (
        ["http://a.b/c?d=e#f", "urn:isbn:1", "mailto:a@b", "http://[::1]:80/", "a:"],
        ["/a", "//a", "http:// a", "http://[:::1]", "a b", "http://a/%zz", "http://ß", ""],
    ),
    "uri-reference": (["", "/a", "//a/b", "?x", "#y", "a/b:c", "http://a"], ["\\\\a", "#a\\b", "a b", "%z"]),
    "iri": (["http://ƒøø.ßår/?∂#x"], ["/a", "\\\\a", "âππ", "http:// "]),
    "iri-reference": (["âππ", "#ƒ", "//ƒ/å"], ["\\\\a", "#a\\b"]),
    "uri-template": (["http://a/{b:3,c*}{?d}", "", "a{b.c}"], ["{", "a}", "{}", "{a", "{a:0}", "{^a}", "a b"]),
    "json-pointer": (["", "/", "/a~0b/~1", "/ä"], ["a", "/~", "/~2", "#/a"]),
    "relative-json-pointer": (["0", "1/a", "12#"], ["", "/a", "-1", "01", "0##", "+1/a"]),
}  # fmt: skip


def test_each_format_has_examples() -> None:
    assert EXAMPLES.keys() == {*FORMATS}


@pytest.mark.parametrize("format", FORMATS)
def test_a_format_is_held(format: str) -> None:
    good, bad = EXAMPLES[format]
    schema = {"type": "string", "format": format}
    for text in good:
        assert takes(schema, json.dumps(text, ensure_ascii=False)), text
    for text in bad:
        assert not takes(schema, json.dumps(text, ensure_ascii=False)), text


READERS = {
    "date": datetime.date.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "idn-hostname": idna.encode,
}


@pytest.mark.parametrize("format", READERS)
def test_whatever_a_format_allows_is_read(format: str) -> None:
    found = [json.loads(text) for text in answers({"type": "string", "format": format}, 40, max_bytes=80)]
    assert len(found) > 10
    for text in found:
        READERS[format](text)


def test_a_format_and_a_pattern_hold_both() -> None:
    schema = {"type": ["string", "null"], "format": "date", "pattern": "^2", "allOf": [{"maxLength": 10}]}
    assert takes(schema, '"2024-02-29"')
    assert takes(schema, "null")
    for text in ('"1999-01-01"', '"2021-02-29"', '"2"'):
        assert not takes(schema, text)


def test_an_unknown_format_beside_a_pattern_is_an_annotation() -> None:
    assert takes({"type": "string", "format": "sku", "pattern": "^[A-Z]+$"}, '"AB"')
    assert not takes({"type": "string", "format": "sku", "pattern": "^[A-Z]+$"}, '"a"')
    with pytest.raises(JobFailure):
        takes({"type": "string", "format": "sku"}, '"a"')


def test_a_schema_of_many_formats_is_held() -> None:
    """llguidance reads half a million characters of a schema; the longest format takes about 5,000."""
    assert max(len("".join(written_patterns(format))) for format in FORMATS) < 6_000
    properties = {f"p{i}": {"type": "string", "format": "uri"} for i in range(100)}
    assert takes({"type": "object", "properties": properties}, '{"p1": "a:b", "p99": "a:"}')
