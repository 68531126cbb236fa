"""What a gateway answers if the server of the queue refuses commands."""

import httpx
import pytest

from sluice.gateway import ServeSettings
from tests.gateway.gateways import serving
from tests.queue.refusing import disk_full
from tests.support.stack import Server

BODY = {"model": "default", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi."}], "input": "Hi."}
ROUTES = {
    "/v1/chat/completions": ("messages",),
    "/v1/responses": ("input",),
    "/v1/messages": ("messages", "max_tokens"),
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "k"}])
async def test_a_full_disk_is_named_with_the_remedy_and_not_taken_for_a_missing_worker(
    path: str, headers: dict[str, str]
) -> None:
    body = {name: BODY[name] for name in ("model", *ROUTES[path])}
    with Server() as server:
        async with disk_full(server) as disk:
            with serving(server.url, ServeSettings(_env_file=None, no_worker_s=0.2)) as gateway:
                async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as http:
                    answer = await http.post(path, json=body, headers=headers)
                    ready = await http.get("/readyz")
                    await disk.free()
                    afterwards = await http.post(path, json=body, headers=headers)
    assert answer.status_code == (529 if path == "/v1/messages" else 503)
    assert answer.headers["x-should-retry"] == "true"
    message = answer.json()["error"]["message"]
    assert "it cannot write to its disk and refuses all writes; free space there" in message
    assert (ready.status_code, "cannot write to its disk" in ready.text) == (503, True)
    assert "worker" in afterwards.json()["error"]["message"], "this server has none"
