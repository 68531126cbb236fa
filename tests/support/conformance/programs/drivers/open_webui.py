"""One turn in Open WebUI, by the routes that its page calls: open_webui.py begin|"go on" IMAGE MESSAGE."""

import base64
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

KEPT = Path("history.json")
MODEL = "my-model"
TO = {"model": MODEL}
START_S = 110.0  # of the server, whose first start imports for a minute
TASKS = ("title", "tags", "follow_up")  # that are asked for beside a chat's first answer


def server() -> tuple["subprocess.Popen[bytes]", str]:
    """Start the server, and wait until it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, "DATA_DIR": str(Path.home() / "data"), "WEBUI_SECRET_KEY": "a"}
    process = subprocess.Popen(command, stdout=sys.stderr, env=env)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return process, url
        except httpx.HTTPError:
            time.sleep(0.2)
    raise RuntimeError("the server did not start")


def answer(client: httpx.Client, messages: list[Any]) -> str:
    """Return the answer, which is printed as it comes. Raises RuntimeError if the stream is an error's, or breaks."""
    said, ended = "", False
    with client.stream("POST", "/api/chat/completions", json={**TO, "stream": True, "messages": messages}) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            if ended := line == "data: [DONE]":
                break
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(json.dumps(event["error"]))
            for choice in event.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                said += piece
                print(piece, end="", flush=True)
    if not ended:
        raise RuntimeError("the stream broke")
    return said


def main(how: str, image: str, message: str) -> None:
    messages: list[Any] = json.loads(KEPT.read_text(encoding="utf-8")) if how == "go on" else []
    picture = image and "data:image/png;base64," + base64.b64encode(Path(image).read_bytes()).decode()
    parts = [{"type": "text", "text": message}, {"type": "image_url", "image_url": {"url": picture}}]
    messages.append({"role": "user", "content": parts if image else message})
    process, url = server()
    try:
        with httpx.Client(base_url=url, timeout=600) as client:
            signed = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
            client.headers["Authorization"] = f"Bearer {signed['token']}"
            models = [model["id"] for model in client.get("/api/models").json()["data"]]
            if MODEL not in models:
                raise RuntimeError(f"the models are {models}")
            messages.append({"role": "assistant", "content": answer(client, messages)})
            for task in TASKS if how == "begin" else ():
                asked = client.post(f"/api/v1/tasks/{task}/completions", json={**TO, "messages": messages})
                if not asked.is_success:
                    raise RuntimeError(f"{task}: {asked.status_code} {asked.text}")
        KEPT.write_text(json.dumps(messages), encoding="utf-8")
    finally:
        process.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
