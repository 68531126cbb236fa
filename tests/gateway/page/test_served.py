"""What is served for the page, without a browser."""

import httpx


async def test_the_page_is_served_with_a_strict_policy_and_needs_nothing_from_elsewhere(
    http: httpx.AsyncClient,
) -> None:
    for path in ("/", "/page/page.js", "/page/page.css", "/page/markdown.js"):
        answer = await http.get(path)
        policy = answer.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= {*policy}
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "innerHTML" not in answer.text
        assert not [place for place in ('src="http', "@import", "url(") if place in answer.text]
    assert (await http.get("/page/nothing.js")).status_code == 404
