"""`ridgeline serve` as a process, and `ridgeline generate`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest
import typer
from tests.serve.running import CONTEXT
from tests.serve.running import process as start
from tests.serve.test_reliability import LONG, call, error, opened
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from ridgeline.cli import app
from ridgeline.spec.errors import UserError


def process(folder, *options, **how):
    return start(folder, "--kv-cache", "1MB", *options, **how)


def sequences(server):
    """How many sequences the server holds."""
    text = call(server, "/metrics")[2]
    return sum(float(n) for n in re.findall(r"^ridgeline_(?:waiting|running|queued_requests) (\S+)", text, re.M))


def test_sigterm_lets_requests_finish_and_takes_no_more(folder):
    with process(folder, "--drain-timeout", "120", "--max-num-batched-tokens", "8", forked=False) as server:
        body = {**LONG, "prompt": "a", "n": 32}
        answers: list[tuple[int, dict, str]] = []
        running = threading.Thread(target=lambda: answers.append(call(server, "/v1/completions", body)))
        stream = opened(server, {**body, "stream": True})
        running.start()
        assert stream.recv(100)
        while sequences(server) < 64:  # both requests have been taken
            assert running.is_alive()
        server.process.send_signal(signal.SIGTERM)
        refused = []
        while running.is_alive() and not refused:
            try:
                refused = [
                    call(server, path, b) for path, b in (("/v1/completions", {"prompt": "b"}), ("/ready", None))
                ]
            except ConnectionError:
                break
            if refused[0][0] != 503:  # the signal has yet to arrive
                refused = []
        running.join(120)
        assert answers[0][0] == 200
        assert [c["finish_reason"] for c in json.loads(answers[0][2])["choices"]] == ["length"] * 32
        assert [status for status, _, _ in refused] == [503, 503]
        assert "shutting down" in error(refused[0][2])["message"]
        rest = b""
        while piece := stream.recv(65536):
            rest += piece
        assert b"data: [DONE]" in rest
        assert server.process.wait(120) == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_what_does_not_finish_in_time_is_ended(folder, signals):
    """After the drain time, or at once by a second signal."""
    with process(
        folder, "--drain-timeout", "0.2" if signals == 1 else "600", "--max-num-batched-tokens", "64"
    ) as server:
        s = opened(server, {**LONG, "n": 128, "stream": True})
        assert s.recv(100)
        for _ in range(signals):
            server.process.send_signal(signal.SIGTERM)
            threading.Event().wait(0.1)
        rest = b""
        try:
            while piece := s.recv(65536):
                rest += piece
        except ConnectionError:
            assert signals == 2
        if signals == 1:
            assert b'"finish_reason":"abort"' in rest
            assert b"data: [DONE]" in rest
        assert server.process.wait(120) == 0


def run(*args):
    """The command line in this process."""
    app(list(map(str, args)), standalone_mode=False)


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_a_drain_has_an_end(folder, seconds):
    with pytest.raises(typer.BadParameter):
        run("serve", folder, "--drain-timeout", seconds)


def test_other_machines_are_let_in_with_a_key_only(folder):
    with pytest.raises(UserError, match="no key"):
        run("serve", folder, "--host", "0.0.0.0")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("options", [["--api-key", ""], ["--api-key", " "], ["--api-key", "k", "--api-key", ""],
                                     ["--admin-key", ""]])  # fmt: skip
def test_a_key_that_is_empty_opens_nothing(folder, host, options):
    with pytest.raises(UserError, match="key is empty"):
        run("serve", folder, "--host", host, "--insecure", *options)


@pytest.mark.parametrize("variable", ["RIDGELINE_API_KEY", "RIDGELINE_ADMIN_KEY"])
def test_nor_does_a_variable_that_is_empty(folder, monkeypatch, variable):
    monkeypatch.setenv(variable, "")
    with pytest.raises(UserError, match="key is empty"):
        run("serve", folder)


@pytest.mark.parametrize("key", ["", " ", " k"])
def test_no_application_takes_such_a_key(key):
    from ridgeline.serve.http import Keys

    with pytest.raises(UserError, match="key is empty"):
        Keys([key])


def test_a_taken_port_is_told(folder, server):
    with pytest.raises(UserError, match="cannot listen"):
        run("serve", folder, "--port", server.url.rsplit(":", 1)[1], "--kv-cache", "1MB")


def test_a_taken_port_is_told_before_the_checkpoint_is_read(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="cannot listen"):
        run("serve", tmp_path, "--port", taken.getsockname()[1])


def test_generate_prints_one_prompt(folder, capsys):
    run("generate", folder, "--prompt", "Hi", "--max-tokens", 8, "--temperature", 1, "--seed", 3)
    first = capsys.readouterr().out
    options = ["--max-tokens", 8, "--temperature", 1, "--seed", 3, "--with", "paged_kv:block_size=8"]
    run("generate", folder, "--prompt", "Hi", *options)
    assert capsys.readouterr().out == first
    assert first.strip()


def test_generate_has_the_servers_sampling_parameters(folder, tmp_path, capsys):
    """Each changes what is drawn in its own way."""
    options = ["--prompt", "Hi", "--max-tokens", 100, "--temperature", 1, "--seed", 3, "--ignore-eos"]
    outputs = []
    for more in ([], ["--min-p", 1], ["--presence-penalty", 2], ["--frequency-penalty", 2],
                 ["--repetition-penalty", 50]):  # fmt: skip
        run("generate", folder, *options, *more)
        outputs.append(capsys.readouterr().out)
    run("generate", folder, *options[:4], "--ignore-eos")
    assert outputs[1] == capsys.readouterr().out  # only the likeliest token is left
    assert len(set(outputs)) == len(outputs)
    with pytest.raises(UserError, match="min_p"):
        run("generate", folder, *options, "--min-p", 2)


def test_generate_keeps_to_a_json_schema(folder, tmp_path, capsys):
    pytest.importorskip("llguidance")
    file = tmp_path / "schema.json"
    options = ["--prompt", "Hi", "--max-tokens", 64, "--json-schema", file]
    file.write_text('{"type": "object", "properties": {"a": {"enum": [3, 4]}}, "required": ["a"]}')
    run("generate", folder, *options)
    assert json.loads(capsys.readouterr().out)["a"] in (3, 4)
    for text in ("{", "[]", '{"type": "nothing"}'):
        file.write_text(text)
        with pytest.raises(UserError, match="schema"):
            run("generate", folder, *options)
    file.unlink()
    with pytest.raises(UserError, match="no file"):
        run("generate", folder, *options)


def test_results_behind_a_link_stay_there(folder, tmp_path):
    given, out, link = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "link.jsonl"))
    given.write_text('{"prompt": "a"}')
    out.write_text('{"id": "1", "error": "too long"}\n')
    link.symlink_to(out)
    run("generate", folder, "--input", given, "--out", link, "--max-tokens", 1)
    assert link.is_symlink()
    assert "outputs" in records_of(out)["1"]


def records_of(file):
    return {r["id"]: r for r in map(json.loads, file.read_text(encoding="utf-8").splitlines())}


def test_generate_goes_on_where_it_stopped(folder, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [{"id": f"p{i}", "prompt": f"prompt {i}", "max_tokens": 4 + i} for i in range(6)]
    prompts.append({"id": "chat", "messages": [{"role": "user", "content": "Hi"}]})
    prompts.append({"id": "long", "prompt": "x" * (CONTEXT + 1)})
    prompts.append({"id": "half", "prompt": "a\ud800"})
    given.write_text("\n".join(map(json.dumps, prompts)))
    options = ["--input", given, "--out", out, "--max-tokens", 5, "--ignore-eos"]
    run("generate", folder, *options)
    whole = records_of(out)
    assert set(whole) == {p["id"] for p in prompts}
    assert [whole[f"p{i}"]["outputs"][0]["tokens"] for i in range(6)] == [4, 5, 6, 7, 8, 9]
    assert "257 tokens" in whole["long"]["error"]
    assert "surrogate" in whole["half"]["error"]
    assert whole["chat"]["prompt"] == "<user>Hi\n<assistant>"
    # As if it had been killed in the middle of a line.
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:3]) + lines[3][:10])
    kept = b"".join(line for line in lines[:3] if b'"outputs"' in line)
    run("generate", folder, *options)
    assert out.read_bytes().startswith(kept)
    assert records_of(out) == whole


@pytest.mark.parametrize("text", ["a note", 'first line\nlast line', '{"prompt": "a"}\n{"prompt": "b"}', "[1]", '"id"',
                                  '{"id": "p", "prompt": "a"}', '{"id": "p", "prompt": "a"}\n{"id": "q'])  # fmt: skip
def test_a_file_that_holds_no_results_stays_as_it_is(folder, tmp_path, text):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text('{"prompt": "a"}')
    out.write_text(text)
    with pytest.raises(UserError, match="not a file of results"):
        run("generate", folder, "--input", given, "--out", out)
    assert out.read_text() == text


def test_prompts_that_failed_are_tried_again(folder, tmp_path):
    """Each id has one line; what failed and is not asked for now stays."""
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    options = ["--input", given, "--out", out, "--max-tokens", 1]
    given.write_text(json.dumps({"prompt": "x" * (CONTEXT + 1)}) + '\n{"prompt": "b"}')
    run("generate", folder, *options)
    good = next(line for line in out.read_text().splitlines() if "outputs" in line)
    other = '{"id": "other", "error": "too long"}'
    out.write_text(f"{out.read_text()}{other}")
    given.write_text('{"prompt": "shorter"}\n{"prompt": "b"}')
    run("generate", folder, *options)
    assert out.read_text().splitlines()[:2] == [good, other]
    assert [r["id"] for r in map(json.loads, out.read_text().splitlines())] == ["2", "other", "1"]
    assert records_of(out)["1"]["prompt"] == "shorter"


def test_a_result_whose_line_has_no_end_is_kept(folder, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text('{"prompt": "a"}\n{"prompt": "b"}')
    out.write_text('{"id": "1", "prompt": "a", "outputs": []}')
    run("generate", folder, "--input", given, "--out", out, "--max-tokens", 1)
    assert set(records_of(out)) == {"1", "2"}
    assert records_of(out)["1"]["outputs"] == []


def test_a_prompt_does_not_take_the_result_of_another(folder, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text('{"prompt": "a"}\n{"prompt": "b"}')
    run("generate", folder, "--input", given, "--out", out, "--max-tokens", 1)
    given.write_text('{"prompt": "new"}\n{"prompt": "a"}\n{"prompt": "b"}')
    before = out.read_bytes()
    with pytest.raises(UserError, match="result of another prompt with id '1'"):
        run("generate", folder, "--input", given, "--out", out, "--max-tokens", 1)
    assert out.read_bytes() == before


def test_an_output_that_cannot_be_written_is_told_before_the_model_is_loaded(folder, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "out.jsonl"):
        with pytest.raises(UserError, match="cannot write"):
            run("generate", folder, "--prompt", "a", "--out", out)


def test_an_empty_stop_string_is_none(folder, capsys):
    run("generate", folder, "--prompt", "Hi", "--max-tokens", 8)
    whole = capsys.readouterr().out
    run("generate", folder, "--prompt", "Hi", "--max-tokens", 8, "--stop", "")
    assert capsys.readouterr().out == whole != "\n"


def test_a_conversation_gets_special_tokens_from_its_template_only(folder, tmp_path):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = tokenizer.encode("a").ids[0]
    tokenizer.post_processor = TemplateProcessing("a $A", special_tokens=[("a", first)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"id": "chat", "messages": [{"role": "user", "content": "Hi"}]}
    given.write_text("\n".join(map(json.dumps, [chat, {"id": "text", "prompt": "<user>Hi\n<assistant>"}])))
    options = ["--max-tokens", 1, "--tokenizer", tmp_path / "tokenizer.json"]
    run("generate", folder, "--input", given, "--out", out, *options)
    found = records_of(out)
    assert found["chat"]["prompt"] == found["text"]["prompt"]
    assert found["chat"]["prompt_tokens"] + 1 == found["text"]["prompt_tokens"]


def test_generate_interrupted_keeps_what_is_done(folder, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [{"prompt": "first", "max_tokens": 1}, *({"prompt": f"prompt {i}"} for i in range(4000))]
    given.write_text("\n".join(map(json.dumps, prompts)))  # one is done at once, the rest takes minutes
    command = [sys.executable, "-m", "ridgeline", "generate", str(folder), "--input", str(given), "--out", str(out),
               "--max-tokens", "200", "--ignore-eos", "--max-num-seqs", "4"]  # fmt: skip
    p = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
    while not (out.exists() and out.stat().st_size):
        assert p.poll() is None, p.stderr.read()
        threading.Event().wait(0.02)
    p.send_signal(signal.SIGINT)
    assert p.wait(120) == 130
    assert 0 < len(records_of(out)) < len(prompts)


@pytest.mark.parametrize(
    ("line", "said"),
    [("{", "not JSON"), ("[1]", "not an object"), ('{"text": "a"}', "neither a prompt nor messages"),
     ('{"prompt": "a", "max_tokens": 0}', "max_tokens"), ('{"prompt": "a", "max_tokens": true}', "max_tokens"),
     ("", "no prompts"), ('{"prompt": "a", "id": 2}\n' * 2, "twice")],
)  # fmt: skip
def test_a_bad_line_is_named(folder, tmp_path, line, said):
    file = tmp_path / "in.jsonl"
    file.write_text(line)
    with pytest.raises(UserError, match=said):
        run("generate", folder, "--input", file, "--out", tmp_path / "out.jsonl")
