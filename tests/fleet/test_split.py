"""Prefill and decode in processes of their own behind the router, some of them killed."""

import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import openai
import pytest
from tests.serve.running import process, tiny

pytest.importorskip("aiohttp")
SECRET = "a secret of the tests"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("split") / "model")


@contextmanager
def router(*servers):
    """The router's address, once all servers are up."""
    command = [sys.executable, "-m", "ridgeline", "router", *(s.url for s in servers), "--port", "0"]
    p = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(p.stderr)
        url = next(line for line in lines if "routing on" in line).split()[-1]
        up = 0
        while up < len(servers):
            up += " is up: " in next(lines)
        threading.Thread(target=lambda: list(lines), daemon=True).start()
        yield url
    finally:
        p.terminate()
        p.wait()


def metrics(url):
    """Values of a server's metrics by name."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        rows = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def test_a_killed_decode_server_loses_no_request(checkpoint, monkeypatch):
    """Through a prefill and a decode server come the tokens of one server alone; when the latter is killed, the former
    answers with the same tokens."""
    monkeypatch.setenv("RIDGELINE_FLEET_SECRET", SECRET)
    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        starting = [pool.submit(stack.enter_context, process(checkpoint, "--role", r)) for r in ("prefill", "decode")]
        prefill, decode = (s.result() for s in starting)
        url = stack.enter_context(router(prefill, decode))

        def text(i, at=url):
            client = openai.OpenAI(base_url=f"{at}/v1", api_key="none", max_retries=0)
            answer = client.completions.create(
                model="model", prompt=f"request {i} {'with a long prompt ' * 8}", max_tokens=24,
                temperature=0.8 * (i % 2), seed=i, extra_body={"ignore_eos": True},
            )  # fmt: skip
            return answer.choices[0].text

        expected = [text(i, prefill.url) for i in range(8)]
        assert [text(i) for i in range(8)] == expected
        there, here = metrics(prefill.url), metrics(decode.url)
        assert here['ridgeline_transfer_prompts_total{result="complete"}'] == 8
        assert here["ridgeline_transfer_received_bytes_total"] == there["ridgeline_transfer_sent_bytes_total"] > 0
        assert here["ridgeline_prompt_tokens_total"] == 0  # all prompts were computed there
        running = [pool.submit(text, i) for i in range(8)]
        decode.process.kill()
        assert [r.result() for r in running] == expected
