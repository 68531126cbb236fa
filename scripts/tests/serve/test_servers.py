"""Starting servers, and the errors of those that do not start."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from scripts.benchmarks.serve import servers
from scripts.benchmarks.serve.driver import drive
from scripts.benchmarks.serve.options import MODELS
from scripts.benchmarks.serve.servers import NotServing
from scripts.benchmarks.serve.workload import Chat, Turn
from tests.support.stack import ROOT, WorkerProcess
from tests.support.stub_server import stub_server


def started_by(code: str, *, start_s: float = 20.0) -> servers.Contender:
    return servers.command(f"mine={sys.executable} -c {shlex.quote(code)} {{model}} {{port}}", start_s)


def test_a_command_that_ends_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    ends = started_by("print('no such model'); exit(3)")
    with pytest.raises(NotServing, match=r"(?s)mine: ended with 3 .*no such model"), ends.serve(tmp_path):
        pass


def test_a_command_that_never_answers_is_stopped(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    silent = started_by(
        f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)", start_s=2.0
    )
    with pytest.raises(NotServing, match="no answer from port"), silent.serve(tmp_path):
        pass
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_a_command_gets_the_model_and_a_port_and_is_stopped_in_the_end(tmp_path: Path) -> None:
    serving = started_by(
        "import sys, http.server as h\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers()\n"
        '        self.wfile.write(b\'{"data": [{"id": "%s"}]}\' % sys.argv[1].encode())\n'
        "h.HTTPServer(('127.0.0.1', int(sys.argv[2])), H).serve_forever()"
    )
    connect: Any
    with serving.serve(tmp_path) as connect:
        url, model = connect(True).args
        assert model == str(tmp_path)
    with pytest.raises(NotServing):
        servers._first_model(url, None)


@pytest.mark.parametrize("text", ["vllm {model} {port}", "a=serve {model}", "a=serve {port}", "=b {model} {port}"])
def test_a_command_has_a_name_a_model_and_a_port(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=COMMAND"):
        servers.command(text, 1.0)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_a_url_is_used_with_or_without_its_version_and_with_its_first_model(suffix: str) -> None:
    with stub_server() as stub:
        contender = servers.endpoint(stub.url.removesuffix("/v1") + suffix, None, None)
        with contender.serve(Path()) as connect:
            async with connect(True) as send:
                await drive(send, [Chat((Turn("text", 3),))], timeout_s=10)
    assert stub.bodies[0]["model"] == "the-model"


@pytest.mark.parametrize("url", ["vllm", "localhost:8000", "ftp://host/v1", "http://"])
def test_a_url_has_a_scheme_and_a_host(url: str) -> None:
    with pytest.raises(ValueError, match="is not an http"):
        servers.endpoint(url, None, None)


def test_a_worker_runs_the_code_of_the_checkout_that_it_is_given(redis_url: str, tmp_path: Path) -> None:
    for package in ("worker", "schemas", "sluice"):
        (tmp_path / package).symlink_to(ROOT / package)
    (tmp_path / "elsewhere.py").write_text("print('from elsewhere')")
    process = WorkerProcess(redis_url, module="elsewhere", root=tmp_path).start(wait=False)
    try:
        assert process.wait() == 0
        assert "from elsewhere" in process.log()
    finally:
        process.stop()


@pytest.mark.parametrize(
    "make", [pytest.param(make, id=name, marks=[pytest.mark.slow] * (name == "large")) for name, make in MODELS.items()]
)
def test_the_models_of_the_bench_answer_as_long_as_they_may(make: Any, tmp_path: Path) -> None:
    network, tokenizer = mlx_lm.load(str(make(tmp_path)))[:2]
    said = list(mlx_lm.stream_generate(network, tokenizer, [10, 11, 12], max_tokens=8))
    assert len(said) == 8
    assert said[-1].finish_reason == "length"
