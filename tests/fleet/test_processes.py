"""The router as a process, before real servers, one of which is killed."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from tests.serve.running import process, tiny

pytest.importorskip("aiohttp")
from ridgeline.fleet import processes

ONE = "--no-engine-process"
"""Half of the processes to start; tests/serve/test_engine_process.py kills the others."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("fleet") / "model")


def test_a_killed_server_loses_nothing_that_has_no_token(checkpoint):
    """Requests in flight when a server is killed are answered by the other, with the tokens that it would give."""
    with process(checkpoint, ONE) as one, process(checkpoint, ONE) as two:
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


def test_a_router_that_is_told_to_end_finishes_what_runs(checkpoint):
    with process(checkpoint, ONE) as server:
        command = [sys.executable, "-m", "ridgeline", "router", server.url, "--port", "0"]
        router = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            lines = iter(router.stderr)
            url = next(line for line in lines if "routing on" in line).split()[-1]
            assert any(" is up: " in line for line in lines)
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            model = client.models.list().data[0].id
            answer = client.completions.create(model=model, prompt="a", max_tokens=100, n=64, stream=True,
                                               extra_body={"ignore_eos": True})  # fmt: skip
            first = next(iter(answer))
            router.terminate()
            ends = [c.finish_reason for chunk in [first, *answer] for c in chunk.choices]
            assert ends.count("length") == 64
            client.close()
            assert router.wait(60) == 0
        finally:
            router.kill()
            router.wait()


def test_a_fleet_of_processes(checkpoint, tmp_path):
    """Servers that are killed come back at their address, a rolling restart loses no request, and all of them end."""
    file = tmp_path / "fleet.toml"
    file.write_text(f'[fleet]\nport = 0\n[[servers]]\ncheckpoint = "{checkpoint}"\nreplicas = 2\noptions = ["{ONE}"]\n')
    command = [sys.executable, "-m", "ridgeline", "fleet"]
    fleet = subprocess.Popen([*command, "up", str(file)], stderr=subprocess.PIPE, text=True)
    lines, more = [], threading.Condition()

    def read():
        for line in fleet.stderr:
            with more:
                lines.append(line)
                more.notify_all()

    threading.Thread(target=read, daemon=True).start()

    def wait(times, what):
        with more:
            assert more.wait_for(lambda: sum(what in x for x in lines) >= times, 120), lines

    def manage(*words):
        done = subprocess.run([*command, *words, "--at", url], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        wait(1, "routing on")
        url = next(x for x in lines if "routing on" in x).split()[-1]
        wait(2, " is up: ")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        model = client.models.list().data[0].id

        def text(i):
            return client.completions.create(model=model, prompt=f"{i}", max_tokens=8, temperature=0).choices[0].text

        expected = [text(i) for i in range(4)]
        children = subprocess.run(["pgrep", "-P", str(fleet.pid)], capture_output=True, text=True).stdout.split()
        assert len(children) == 2
        os.kill(int(children[0]), signal.SIGKILL)
        assert [text(i) for i in range(4)] == expected
        wait(3, " is up: ")
        assert "restarted one after another" in manage("restart")
        count = 0
        while sum("was restarted" in x for x in lines) < 2:
            assert text(count % 4) == expected[count % 4]
            count += 1
            time.sleep(0.03)  # leave the processors to those that start
        assert count > 3
        assert manage("status").count(" up ") == 2
        assert "2 servers end" in manage("down")
        assert fleet.wait(60) == 0
        assert not any(os.path.exists(f"/proc/{pid}") for pid in children)
    finally:
        fleet.terminate()
        fleet.wait(60)


OPTIONS = [(["--drain-timeout", "90"], 90), (["--drain-timeout=5"], 5), ([], 30), (["--drain-timeout"], 30),
           *((["--drain-timeout", x], 30) for x in ("x", "nan", "inf", "-1"))]  # fmt: skip


@pytest.mark.parametrize(("options", "seconds"), OPTIONS)
def test_a_servers_drain_timeout(options, seconds):
    server = processes.ServerProcess(processes.ServerTable(checkpoint=".", options=options), print, b"")
    assert server.drain == seconds


def test_a_fleet_that_ends_leaves_servers_their_drain_timeout(checkpoint, monkeypatch):
    """It kills what does not end by itself, but only after that."""
    monkeypatch.setattr(processes, "GRACE", 0.1)

    async def test():
        server = processes.ServerProcess(processes.ServerTable(checkpoint=str(checkpoint), options=[ONE]),
                                         lambda _: None, b"")  # fmt: skip
        running = asyncio.create_task(server.run())
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            while True:
                with contextlib.suppress(openai.APIConnectionError):
                    model = (await client.models.list()).data[0].id
                    break
                assert not running.done()
                await asyncio.sleep(0.1)
            answer = await client.completions.create(model=model, prompt="a", max_tokens=100, n=64, stream=True,
                                                     extra_body={"ignore_eos": True})  # fmt: skip
            first = await anext(answer)  # so it runs
            stopping = asyncio.create_task(server.stop())
            ends = [c.finish_reason for chunk in [first, *[x async for x in answer]] for c in chunk.choices]
            assert ends.count("length") == 64
            await stopping
            await running

    asyncio.run(asyncio.wait_for(test(), 120))


def test_a_server_that_refuses_its_options_ends_the_fleet(checkpoint, tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text(f"[fleet]\nport = 0\n[[servers]]\ncheckpoint = '{checkpoint}'\noptions = ['--max-num-seqz', '4']\n")
    done = subprocess.run([sys.executable, "-m", "ridgeline", "fleet", "up", str(file)], stderr=subprocess.PIPE,
                          text=True, timeout=120)  # fmt: skip
    assert done.returncode == 2
    assert "No such option: --max-num-seqz" in done.stderr
    assert "error: a server of" in done.stderr
    assert "started again" not in done.stderr
    assert "Traceback" not in done.stderr


def test_no_fleet_there():
    done = subprocess.run([sys.executable, "-m", "ridgeline", "fleet", "status", "--at", "http://127.0.0.1:9"],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 2
    assert "no fleet at" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("text", "says"), [
    ("", "servers"), ("[[servers]]\ncheckpoint = 'nowhere'\n", "no checkpoint"), ("x =", "TOML"),
    ("[[servers]]\ncheckpoint = '.'\noptions = ['--port=1']\n", "--port"),
    ("[fleet]\npolicy = 'best'\n[[servers]]\ncheckpoint = '.'\n", "policy"),
])  # fmt: skip
def test_bad_fleet_files(tmp_path, text, says):
    from ridgeline.fleet.processes import load_fleet
    from ridgeline.spec.errors import UserError

    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        load_fleet(path)
