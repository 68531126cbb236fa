import re

import pytest
from httpcore2 import URL

from sluice.network import host_header
from worker.errors import JobFailure
from worker.images.fetch import parse_url, redirected


def of(scheme: str, host: str, port: int, target: str) -> URL:
    return URL(scheme=scheme, host=host, port=port, target=target)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://a.example", of("http", "a.example", 80, "/")),
        ("https://a.example?q", of("https", "a.example", 443, "/?q")),
        ("https://bücher.example:444/", of("https", "xn--bcher-kva.example", 444, "/")),
        ("http://[2606:4700::1]:81/x", of("http", "2606:4700::1", 81, "/x")),
        ("http://a.example/x\r\nHost: b.example", of("http", "a.example", 80, "/xHost:%20b.example")),
        ("http://a.example/%0d%0aHost:b", of("http", "a.example", 80, "/%0d%0aHost:b")),
    ],
)
def test_a_url_says_where_it_leads(url: str, target: URL) -> None:
    assert parse_url(url) == target
    assert re.fullmatch(rb"[!-~]+", target.target), "it stays on its line"


UNREADABLE = ["http://", "http:///a", "http://a.example:x/", "http://a.example:99999/", "http://[::1/", "http://a..b/"]


@pytest.mark.parametrize("url", [*UNREADABLE, "http://a b/", "http://a\\b.example/", f"http://{'a' * 64}.example/"])
def test_a_url_that_cannot_be_read_is_refused(url: str) -> None:
    with pytest.raises(JobFailure, match=r"^the URL is invalid\.$"):
        parse_url(url)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a.example/", "a.png", "//a.example/", "javascript:x", ""])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(JobFailure, match=r"^the URL must begin with https:, http: or data:\.$"):
        parse_url(url)


def test_a_url_with_a_password_is_refused() -> None:
    with pytest.raises(
        JobFailure, match=r"^the URL contains a user name; remove it, since requests are sent without credentials\.$"
    ):
        parse_url("https://me:secret@a.example/")


def test_port_0_is_refused() -> None:
    with pytest.raises(JobFailure, match="port 0"):
        parse_url("http://a.example:0/")


def test_a_url_of_a_megabyte_is_refused() -> None:
    with pytest.raises(JobFailure, match=r"^the URL is longer than 8,192 characters\.$"):
        parse_url("https://a.example/" + "x" * 1_000_000)


@pytest.mark.parametrize(
    ("url", "header"),
    [
        ("http://a.example/", "a.example"),
        ("https://a.example:443/", "a.example"),
        ("http://a.example:443/", "a.example:443"),
        ("http://[2606:4700::1]/", "[2606:4700::1]"),
        ("http://[2606:4700::1]:81/", "[2606:4700::1]:81"),
    ],
)
def test_a_host_is_named_as_servers_expect_it(url: str, header: str) -> None:
    assert host_header(parse_url(url)) == header


def test_a_redirect_is_relative_to_its_url() -> None:
    assert redirected("https://a.example/b/c", "../d?e") == "https://a.example/d?e"
    with pytest.raises(JobFailure) as raised:
        redirected("https://a.example/", "http://[")
    assert raised.value.type == "invalid_request"
