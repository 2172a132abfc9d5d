"""The router as a process, before real servers, one of which is killed."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from tests.serve.running import process, tiny

pytest.importorskip("aiohttp")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("fleet") / "model")


def test_a_killed_server_loses_nothing_that_has_no_token(checkpoint):
    """Requests in flight when a server is killed are answered by the other, with the tokens that it would give."""
    with process(checkpoint) as one, process(checkpoint) as two:
        command = [sys.executable, "-m", "ridgeline", "router", one.url, two.url, "--port", "0"]
        router = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            lines = iter(router.stderr)
            url = next(line for line in lines if "routing on" in line).split()[-1]
            up = 0
            while up < 2:
                up += " is up: " in next(lines)
            threading.Thread(target=lambda: list(lines), daemon=True).start()
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            model = client.models.list().data[0].id

            def text(i):
                answer = client.completions.create(model=model, prompt=f"request {i}", max_tokens=24, temperature=0,
                                                   extra_body={"ignore_eos": True})  # fmt: skip
                return answer.choices[0].text

            expected = [text(i) for i in range(12)]
            with ThreadPoolExecutor(6) as pool:
                running = [pool.submit(text, i) for i in range(12)]
                one.process.kill()
                assert [r.result() for r in running] == expected
        finally:
            router.terminate()
            router.wait()
