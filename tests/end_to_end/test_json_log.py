"""The log of a worker as JSON."""

import json

from sluice import Client
from tests.support.stack import WorkerProcess


async def test_a_job_has_three_lines_with_ids_and_numbers_and_no_prompt(redis_url: str, client: Client) -> None:
    secret = "Count to 3. The word is xylophone."
    with WorkerProcess(redis_url, log_format="json") as worker:
        request = {"messages": [{"role": "user", "content": secret}], "tenant": "acme"}
        job = await client.submit(request)
        result = await client.result(job.id)
        log = worker.log()
    lines = [json.loads(line) for line in log.splitlines()]
    assert all(line["model"] == "default" and line["time"].endswith("+00:00") for line in lines)
    prepared, first, finished = (line for line in lines if line.get("job") == job.id)
    timings = result["sluice"]["timings"]
    for line in (prepared, first, finished):
        assert (line["tenant"], line["queue"], line["attempt"]) == ("acme", "interactive", 1)
    assert prepared["prompt_tokens"] == finished["prompt_tokens"] == result["usage"]["prompt_tokens"]
    assert first["first_token_s"] == round(timings["ttft_s"], 3)
    assert finished["queue_s"] == timings["queue_s"]
    assert finished["finish_reason"] == result["choices"][0]["finish_reason"]
    assert "xylophone" not in log
