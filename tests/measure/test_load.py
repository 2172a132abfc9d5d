"""The load generator against a server of known latency, in another process: what it sends, counts, times and says."""

import asyncio
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from itertools import pairwise

import pytest

from ridgeline import cli
from ridgeline.measure.load.ask import make_prompts, workloads
from ridgeline.measure.load.drive import _Driver, drive
from ridgeline.measure.load.endpoint import Endpoint, find_endpoint, refused
from ridgeline.measure.load.prompts import RandomIds
from ridgeline.measure.load.run_load import measure_load
from ridgeline.measure.load.summary import summarize
from ridgeline.predict.serving.arrivals import Arrival, requests
from ridgeline.spec.errors import UserError
from ridgeline.spec.result import Result
from ridgeline.spec.workload import Serve
from ridgeline.store import Store

TTFT, GAP = 0.05, 0.01
CLOCK = 2e-3
"""Seconds that timers may be early by."""


@contextmanager
def mock(**options):
    """Address of a mock server with these options."""
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in {"ttft": TTFT, "gap": GAP, **options}.items()]
    command = [sys.executable, "-m", "ridgeline.measure.load.mock", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server():
    with mock() as address:
        yield address


def load(address, w, **how):
    endpoint = find_endpoint(address, **how)
    return measure_load(endpoint, w, make_prompts(endpoint.api, None, None, 256, 0, 0)[0])


def even(n, rate, prompt=16, output=8):
    return [Arrival(i / rate, prompt, output) for i in range(n)]


def stats(address):
    return json.load(urllib.request.urlopen(f"{address}/stats"))


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_known_latencies_are_found(server, api):
    w = Serve(rate=60, requests=120, prompt_len=32, output_len=10, slo_ttft=10.0, slo_tpot=10.0)
    result, d = load(server, w, api=api)
    m = {k: v.value for k, v in result.metrics.items()}
    assert result.status == "ok"
    # A sleep never ends early, so these hold however busy the machine is; the benchmark holds the client to 2 %.
    assert m["ttft_p50_s"] >= TTFT - CLOCK
    assert m["tpot_p50_s"] >= GAP - CLOCK
    firsts = [r.first - r.intended for r in d.records]
    assert m["ttft_p50_s"] == pytest.approx(statistics.median(firsts))
    assert m["e2e_s"] == pytest.approx(m["ttft_s"] + 9 * m["tpot_s"], rel=1e-6), "all outputs are of one length"
    assert (m["errors"], m["requests"], m["slo_share"], m["tokens_per_chunk"]) == (0, 120, 1.0, 1.0)
    assert m["tokens_per_s"] == pytest.approx(10 * m["requests_per_s"])
    assert m["goodput_per_s"] == m["requests_per_s"]
    assert m["concurrency_mean"] == pytest.approx(m["requests_per_s"] * m["e2e_s"], rel=0.05), "Little's law"
    assert all(c.passed for c in result.checks if c.name != "requests were sent on time")
    assert [r.tokens for r in d.records] == [10] * 120


def test_arrivals_are_those_that_a_prediction_assumes(server):
    w = Serve(rate=100, requests=50, prompt_len=20, output_len=4, length_cv=0.5, length_shape="lognormal", seed=3)
    _, d = load(server, w)
    asked = requests(w)
    assert [(r.prompt_len, r.output_len) for r in d.records] == [(a.prompt, a.output) for a in asked]
    assert [r.intended - d.began for r in d.records] == pytest.approx([a.arrival for a in asked])
    # Requests milliseconds apart may overtake each other on a busy machine.
    assert sorted(stats(server)["prompts"][-50:]) == sorted(a.prompt for a in asked), "the server got these lengths"
    assert [r.output_tokens for r in d.records] == [a.output for a in asked]


def test_a_slow_server_does_not_slow_the_schedule_and_waiting_counts():
    with mock(ttft=0.5) as address:
        d = drive(find_endpoint(address), even(30, 100), RandomIds())
    sent = [r.sent - d.began for r in d.records]
    assert sent[-1] < 0.5 * 29 / 2, "requests one after another would take that twice"
    assert all(r.ttft >= r.first - r.sent for r in d.records), "latency counts from the intended time"
    assert max(r.lag for r in d.records) >= 0


def test_a_late_client_charges_itself(server):
    """Prompts that take long to make delay the sending: the delay is in the latency and is told."""

    class Slow(RandomIds):
        def make(self, index, length):
            time.sleep(0.02)
            return super().make(index, length)

    w = Serve(rate=200, requests=60, prompt_len=8, output_len=2)
    result, d = measure_load(find_endpoint(server), w, Slow())
    assert statistics.median(r.lag for r in d.records) > 0.1
    assert result.metrics["ttft_s"].value > TTFT + 0.1
    assert not next(c for c in result.checks if c.name == "requests were sent on time").passed
    assert any("could not keep the schedule" in n for n in result.notes)


def test_closed_loop_keeps_so_many_under_way(server):
    w = Serve(concurrency=8, requests=40, prompt_len=8, output_len=5)
    result, d = load(server, w)
    ends, sends = sorted(r.end for r in d.records), sorted(r.sent for r in d.records)
    for k in range(8, 40):
        assert sends[k] >= ends[k - 8], "the next is sent when one has ended"
    assert 5 < result.metrics["concurrency_mean"].value <= 8
    assert "schedule_lag_s" not in result.metrics


def test_failures_are_counted_by_kind_and_are_not_good():
    with mock(fail_every=5, cut_every=7) as address:
        w = Serve(rate=200, requests=70, prompt_len=8, output_len=6, slo_ttft=10.0)
        result, d = load(address, w)
    kinds = [r.error for r in d.records]
    refused = kinds.count("HTTP 503")
    assert refused == 14
    assert kinds.count("cut off") == 8  # of 73 with the warm-up, every seventh that is no fifth
    assert result.metrics["errors"].value == 22
    assert result.metrics["slo_share"].value == pytest.approx(48 / 70)
    assert any(n.startswith("14 of 70 requests failed: HTTP 503 (the queue is full)") for n in result.notes)


def test_chunks_of_several_tokens_are_told_from_tokens():
    with mock(per_chunk=4) as address:
        result, _ = load(address, Serve(rate=100, requests=30, prompt_len=8, output_len=13))
    m = {k: v.value for k, v in result.metrics.items()}
    assert m["output_tokens_mean"] == 13
    assert m["tokens_per_chunk"] == pytest.approx(13 / 4)
    assert GAP - CLOCK <= m["tpot_p50_s"] < 3 * GAP, "per token, of which a chunk holds four"
    assert m["itl_s"] == pytest.approx(4 * m["tpot_s"]), "per chunk"
    assert any("a chunk holds 3.25 tokens" in n for n in result.notes)


def test_percentiles_and_intervals_that_the_sample_cannot_carry_are_left_out(server):
    few, _ = load(server, Serve(rate=200, requests=15, prompt_len=8, output_len=2))
    assert {"ttft_s", "ttft_p50_s", "ttft_p90_s"} <= set(few.metrics)
    assert "ttft_p99_s" not in few.metrics
    assert few.metrics["ttft_s"].low is None
    enough, _ = load(server, Serve(rate=100, requests=150, prompt_len=8, output_len=2))
    p99 = enough.metrics["ttft_p99_s"]
    assert p99.low is not None
    assert p99.low <= p99.value <= p99.high


def test_timeout_and_refused_connections_are_results():
    with mock(ttft=5.0) as address:
        endpoint = find_endpoint(address)
    gone = drive_without_warmup(endpoint, even(5, 100))
    assert {r.error for r in gone.records} == {"connection refused"}
    with mock(ttft=5.0) as address:
        slow = drive_without_warmup(find_endpoint(address), even(5, 100), timeout=0.3)
    assert {r.error for r in slow.records} == {"timeout"}


def drive_without_warmup(endpoint, asked, timeout=10.0):
    return drive(endpoint, asked, RandomIds(), warmup=0, timeout=timeout)


def test_connections_are_used_again(server):
    before = connections()
    d = drive(find_endpoint(server), even(40, 20, output=2), RandomIds())
    assert all(r.ok for r in d.records)
    assert connections() - before <= 0, "and none stays open"


def connections():
    import psutil

    return len(psutil.Process().net_connections("tcp"))


# ---- what a user writes and reads -----------------------------------------------------------------------------------


@pytest.fixture
def ridgeline(monkeypatch, capsys):
    def _run(*args):
        monkeypatch.setattr(sys, "argv", ["ridgeline", *args])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return stop.value.code or 0, out, err

    return _run


def test_a_sweep_on_the_command_line(server, ridgeline, tmp_path):
    report, lines = tmp_path / "load.html", tmp_path / "load.jsonl"
    code, out, err = ridgeline(
        "load", server, "--rate", "50,100", "--requests", "40", "--input-len", "uniform:4-12", "--output-len", "6",
        "--slo", "ttft=2s,tpot=500ms", "--report", str(report), "--records", str(lines), "--json", "--key", "secret",
    )  # fmt: skip
    assert code == 0, err
    results = [Result.model_validate(r) for r in json.loads(out)]
    assert [r.experiment["workload"]["rate"] for r in results] == [50, 100]
    assert results[0].experiment["workload"]["slo_tpot"] == 0.5
    assert "secret" not in out + report.read_text()
    assert len(lines.read_text().splitlines()) == 80
    page = report.read_text()
    for chart in ("cdf-ttft", "cdf-itl", "throughput-ttft", "throughput-tpot"):
        assert f'data-chart="{chart}"' in page
    points = results[0].distributions["ttft_s"]
    assert points == sorted(points)
    assert points[100] == pytest.approx(results[0].metrics["ttft_p50_s"].value, abs=1e-6)


def test_two_servers_under_the_same_load(server, ridgeline, tmp_path):
    """One is three times as slow per token; whoever comes first alternates, and both get the same prompts."""
    with mock(gap=3 * GAP) as slow:
        asked = ["--rate", "50", "--requests", "20", "--input-len", "4", "--output-len", "6", "--run", "3"]
        code, out, err = ridgeline("load", server, "--against", slow, "--rounds", "3", *asked, "--json", "--records",
                                   str(tmp_path / "all.jsonl"))  # fmt: skip
        assert code == 0, err
        found = {m["name"]: m for m in json.loads(out)["metrics"]}
        tpot = found["tpot_s"]
        assert tpot["b"] / tpot["a"] == pytest.approx(3, rel=0.5)
        assert tpot["low"] <= tpot["ratio"] <= tpot["high"]
        assert tpot["low"] > 1
        assert tpot["verdict"] == "slower"
        sent = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
        assert len(sent) == 2 * 3 * 20
        assert json.loads(out)["a"].startswith(server)
        code, out, err = ridgeline("load", server, "--against", slow, *asked[2:], "--rate", "50,60")
        assert (code, "give one rate" in err) == (2, True)


def test_mistakes_are_one_message(server, ridgeline, tmp_path):
    with mock(key="open") as closed:
        for args, said in [
            (["http://127.0.0.1:9"], "nothing answers at http://127.0.0.1:9/v1"),
            (["ftp://here"], "no address of a server"),
            ([server, "--model", "mok"], "has no model 'mok'"),
            ([closed], "answers 401: no such key"),
            ([closed, "--key", "shut"], "answers 401"),
            ([server, "--api", "char"], "unknown api 'char'"),
            ([server, "--arrival", "posson"], "unknown arrival 'posson'"),
            ([server, "--arrival", "closed:4", "--rate", "3"], "leave out --rate"),
            ([server, "--rate", "-1"], "no positive number"),
            ([server, "--input-len", "long"], "is no length"),
            ([server, "--slo", "e2e=3s"], "is no limit"),
            ([server, "--arrival", f"trace:{tmp_path}/none.csv"], "cannot read trace"),
            ([server, "--tokenizer", str(tmp_path)], "no tokenizer at"),
            ([server, "--extra-body", "[1]"], "no JSON object"),
            ([server, "--records", str(tmp_path)], "it is a directory"),
            ([server, "--report", "/proc/none/r.html"], "cannot write to /proc/none"),
            ([server, "--arrival", "closed:2.5"], "no whole number"),
            ([server, "--arrival", "even:3"], "takes nothing after"),
            ([server, "--input-len", "0"], "is no length"),
            (
                [server, "--shared-prefix", "600", "--input-len", "16"],
                "--shared-prefix 600 is the beginning of every prompt",
            ),
        ]:
            code, out, err = ridgeline("load", *args)
            assert code == 2, (args, err)
            assert said in err
            assert "fix:" in err
            assert not out
        assert ridgeline("load", closed, "--key", "open", "--requests", "2", "--output-len", "2")[0] == 0


def test_results_are_kept_before_files_are_written(server, ridgeline, tmp_path, monkeypatch):
    """A disk may fill up meanwhile: the load cannot be sent again as it was."""

    def full(*_):
        raise UserError("cannot write: No space left on device")

    monkeypatch.setattr("ridgeline.measure.load.run_load.write_records", full)
    asked = [
        "--rate",
        "50",
        "--requests",
        "4",
        "--input-len",
        "4",
        "--output-len",
        "2",
        "--records",
        str(tmp_path / "r"),
    ]
    for against in ([], ["--against", server, "--rounds", "1"]):
        before = len(Store().list(limit=None))
        code, _, err = ridgeline("load", server, *asked, *against)
        assert (code, "No space left" in err) == (2, True)
        assert len(Store().list(limit=None)) == before + (2 if against else 1)


def test_a_refused_first_request_says_what_the_server_said():
    with mock(vocab=100) as address, pytest.raises(UserError, match="outside the vocabulary of 100") as caught:
        load(address, Serve(rate=10, requests=5, prompt_len=50, output_len=2))
    assert "--vocab-size" in str(caught.value)


def test_interrupt_keeps_what_is_there(server, tmp_path):
    command = [sys.executable, "-m", "ridgeline", "load", server, "--rate", "50", "--requests", "5000",
               "--output-len", "3", "--json", "--records", str(tmp_path / "r.jsonl")]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    before = stats(server)["requests"]
    while stats(server)["requests"] < before + 25:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    result = Result.from_json(out)
    assert result.status == "interrupted"
    assert 10 <= result.metrics["requests"].value < 5000
    assert result.metrics["errors"].value == 0
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == result.metrics["requests"].value


def test_a_prompt_that_is_too_long_is_told_the_option():
    assert "--input-len" in str(refused("http://x/v1", 400, "the prompt has 512 tokens, and 64 fit"))


def test_ctrl_c_again_while_the_result_is_summarized(server, monkeypatch, capsys):
    """The first ends the load; what it found is stored and printed whatever comes then."""

    def summarized(*args):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)  # where Python would act on it
        return summarize(*args)

    monkeypatch.setattr("ridgeline.measure.load.run_load.summarize", summarized)
    monkeypatch.setattr(sys, "argv", ["ridgeline", "load", server, "--rate", "50", "--requests", "5000",
                                      "--output-len", "3", "--json"])  # fmt: skip
    before, handler = stats(server)["requests"], signal.getsignal(signal.SIGINT)

    def interrupt():
        while stats(server)["requests"] < before + 25:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    first = threading.Thread(target=interrupt)
    first.start()
    with pytest.raises(SystemExit) as stop:
        cli.main()
    first.join()
    out, err = capsys.readouterr()
    assert stop.value.code == 130
    assert "stored as" in err
    assert Result.from_json(out).status == "interrupted"
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("more", [["--rate", "50,60"], ["--rate", "50", "--against", "SERVER", "--rounds", "2"]])
def test_ctrl_c_in_a_later_warm_up_keeps_what_was_measured_before(more, server, monkeypatch, capsys):
    """Of the load that had not begun there is nothing."""
    warm, whole = _Driver._warm, 1 if "50,60" in more else 2

    async def interrupted(self, i):
        begun.append(self)
        if len(begun) > whole:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
        await warm(self, i)

    begun: list[_Driver] = []
    monkeypatch.setattr(_Driver, "_warm", interrupted)
    asked = [server if part == "SERVER" else part for part in more]
    monkeypatch.setattr(sys, "argv", ["ridgeline", "load", server, *asked, "--requests", "3", "--warmup", "1",
                                      "--output-len", "2", "--json"])  # fmt: skip
    before = len(Store().list(limit=None))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 130
    assert len(Store().list(limit=None)) == before + whole
    assert json.loads(capsys.readouterr().out)


def test_workloads_as_written(tmp_path):
    (w,) = workloads("8", "burst", "lognormal:512,0.8", "100", None, "ttft=500ms", 1)
    assert (w.burstiness, w.length_shape, w.length_cv, w.output_cv, w.requests) == (0.25, "lognormal", 0.8, 0.0, 480)
    assert w.slo_ttft == 0.5
    (u,) = workloads("2", "even", "uniform:100-900", "uniform:1-3", 5000, None, 1)
    drawn = requests(u)
    assert {r.output for r in drawn} == {1, 2, 3}
    assert min(r.prompt for r in drawn) >= 99
    assert max(r.prompt for r in drawn) <= 901
    gaps = [b.arrival - a.arrival for a, b in pairwise(drawn)]
    assert statistics.pstdev(gaps) < 0.02 * statistics.mean(gaps)
    (lognormal,) = workloads("2", "poisson", "lognormal:400,0.5", "lognormal:100,1.0", 20_000, None, 1)
    prompts = [r.prompt for r in requests(lognormal)]
    assert statistics.mean(prompts) == pytest.approx(400, rel=0.02)
    assert statistics.pstdev(prompts) / 400 == pytest.approx(0.5, rel=0.05)
    assert statistics.median(prompts) == pytest.approx(400 / math.sqrt(1.25), rel=0.03), "e to the mean of the log"
    with pytest.raises(UserError, match="one kind"):
        workloads("2", "poisson", "uniform:1-9", "gamma:9,0.5", None, None, 0)
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
                     "2023-11-16 18:15:50.9951690,396,109\n")  # fmt: skip
    (t,) = workloads(None, f"trace:{trace}", "1", "1", None, None, 0)
    assert [(r.prompt, r.output) for r in requests(t)] == [(374, 44), (396, 109)]


def test_prompts_are_of_the_asked_length_and_share_what_they_should(tmp_path):
    from ridgeline.data.batches import train_tokenizer

    ids = RandomIds(1000, seed=1, shared=20)
    a, b = ids.make(0, 50), ids.make(1, 50)
    assert (len(a), len(b)) == (50, 50)
    assert a[:20] == b[:20]
    assert a[20:] != b[20:]
    assert a == RandomIds(1000, seed=1, shared=20).make(0, 50)
    assert len(ids.make(2, 5)) == 5
    assert ids.make(-1, 50) != a, "warm-up sends other prompts"
    tokenizer = train_tokenizer([json.__doc__ or "", statistics.__doc__ or ""], 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = tmp_path / "words.txt"
    words.write_text("".join(f"{statistics.__doc__} {i}" for i in range(20)))
    text, _ = make_prompts("chat", str(words), str(tmp_path), 256, 10, 0)
    said = text.make(0, 40)
    assert isinstance(said, str)
    assert abs(len(tokenizer.encode(said).ids) - 40) <= 4
    exact, _ = make_prompts("completions", str(words), str(tmp_path), 256, 10, 0)
    assert len(exact.make(0, 40)) == 40
    rough, _ = make_prompts("chat", None, None, 256, 0, 0)
    assert len(rough.make(0, 100)) == 400


def test_addresses():
    assert Endpoint("http://h:1/v1", "chat", "m").url == "http://h:1/v1/chat/completions"
    body = json.loads(Endpoint("http://h/v1", "completions", "m", extra={"top_k": 1}).body([1, 2], 7))
    assert (body["prompt"], body["max_tokens"], body["min_tokens"], body["top_k"]) == ([1, 2], 7, 7, 1)
    plain = json.loads(Endpoint("http://h/v1", "chat", "m", ignore_eos=False).body("hello", 7))
    assert "ignore_eos" not in plain
    assert plain["messages"] == [{"role": "user", "content": "hello"}]
