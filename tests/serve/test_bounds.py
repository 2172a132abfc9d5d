"""What one request, or one connection, may cost before it is refused: counted, not timed."""

import json
import socket
import threading
import tracemalloc
from urllib.parse import urlsplit

import pytest
from tests.serve.running import CONTEXT, running
from tests.serve.test_reliability import Slow, call, error, opened

from ridgeline.serve import detokenize as text
from ridgeline.serve.bodies import WrongBody, parse
from ridgeline.serve.chat import ChatCompletion
from ridgeline.serve.openai import Completion, Detokenize
from ridgeline.serve.pooled_bodies import EmbeddingRequest
from ridgeline.serve.queue_limits import QueueLimits

JSON = "application/json"


def refused(model, body):
    with pytest.raises(WrongBody) as e:
        parse(model, json.dumps(body).encode(), JSON, CONTEXT)
    return e.value


# ---- bodies --------------------------------------------------------------------------------------------------------

MANY = 50_000
FAULTS = {
    "tokens": (Completion, {"prompt": [-1] * MANY}),
    "batches": (Completion, {"prompt": [[-1] * (CONTEXT - 1)] * 200}),
    "texts": (Completion, {"prompt": ["a", *[1] * 200]}),
    "inputs": (EmbeddingRequest, {"input": [-1] * MANY}),
    "ids": (Detokenize, {"tokens": [-1] * MANY}),
    "stops": (Completion, {"prompt": "a", "stop_token_ids": [-1] * MANY}),
    "biases": (Completion, {"prompt": "a", "logit_bias": {f"a{i}": 1 for i in range(MANY)}}),
    "metadata": (Completion, {"prompt": "a", "metadata": {str(i): 1 for i in range(MANY)}}),
    "choices": (Completion, {"prompt": "a", "structured_outputs": {"choice": [""] * MANY}}),
    "surrogate": (Completion, {"prompt": "a", "\ud800": 1}),
    "unknown": (Completion, {"prompt": "a", **{f"x{i}": 1 for i in range(MANY)}}),
    "messages": (ChatCompletion, {"messages": [{}] * MANY}),
    "fields": (ChatCompletion, {"messages": [{"role": "a", "content": "b", **{f"x{i}": 1 for i in range(MANY)}}]}),
    "parts": (ChatCompletion, {"messages": [{"role": "a", "content": [{}] * MANY}]}),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_body_is_refused_at_its_first_fault(kind):
    """Not with an error for every element: that took 1.4 kB for each, and seconds of the event loop."""
    model, body = FAULTS[kind]
    raw = json.dumps(body).encode()
    json.loads(raw)
    tracemalloc.start()
    try:
        json.loads(raw)
        alone = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        with pytest.raises(WrongBody) as e:
            parse(model, raw, JSON, CONTEXT)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * alone + 300_000, "what the JSON itself takes, and something for the message"
    assert len(str(e.value)) < 1000


def test_bodies_are_validated_beside_the_event_loop(server, monkeypatch):
    seen = []

    def watched(*args):
        seen.append(threading.current_thread())
        return parse(*args)

    monkeypatch.setattr("ridgeline.serve.bodies.parse", watched)
    assert call(server, "/v1/completions", {"prompt": [-1]})[0] == 400
    assert seen
    assert server.thread not in seen


def test_the_length_is_told_before_the_elements():
    e = refused(Completion, {"prompt": [-1] * (CONTEXT + 1)})
    assert (e.param, e.code) == ("prompt", "context_length_exceeded")
    assert f"{CONTEXT + 1} tokens, and the model's maximum context length is {CONTEXT}" in str(e)


def test_the_description_has_the_bodies(server):
    paths = json.loads(call(server, "/openapi.json")[2])["paths"]
    schema = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["$ref"].endswith("/Completion")


# ---- texts ---------------------------------------------------------------------------------------------------------


class Counting:
    """A tokenizer that counts what it is given; without ``encode``, which holds the interpreter's lock."""

    def __init__(self, real):
        self.real, self.seen = real, 0

    def encode_batch(self, texts, **options):
        self.seen += sum(map(len, texts))
        return self.real.encode_batch(texts, **options)


@pytest.fixture
def counting(server, monkeypatch):
    found = Counting(server.service.vocabulary.tokenizer)
    monkeypatch.setattr(server.service.vocabulary, "tokenizer", found)
    return found


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(server, counting):
    long = "x" * (CONTEXT * server.service.vocabulary.longest + 1)
    for path, body, param in (
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/completions", {"prompt": ["a", long]}, "prompt"),
        ("/v1/completions", {"prompt": "猫" * (len(long) // 3 + 1)}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("/v1/embeddings", {"input": long}, "input"),
        ("/tokenize", {"prompt": long}, "prompt"),
    ):
        status, _, said = call(server, path, body)
        assert (status, error(said)["param"], error(said)["code"]) == (400, param, "context_length_exceeded"), path
    assert counting.seen == 0
    assert call(server, "/v1/completions", {"prompt": "abc", "max_tokens": 1})[0] == 200
    assert counting.seen == 3


def test_tokenizing_gives_what_the_tokenizer_gives(server):
    vocabulary = server.service.vocabulary
    for said in ("The cat", "thé 猫", ""):
        assert vocabulary.encode(said) == vocabulary.tokenizer.encode(said).ids


def test_a_tokenizer_neither_pads_nor_cuts(server):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(server.service.vocabulary.tokenizer.to_str())
    plain = tokenizer.encode("a text").ids
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(2)
    assert text.Vocabulary(tokenizer, 258).encode("a text") == plain


# ---- outputs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def jobs(monkeypatch):
    """How many jobs have been made."""
    made = []
    real = text.ServeJob.__post_init__
    monkeypatch.setattr(text.ServeJob, "__post_init__", lambda self: (made.append(1), real(self)))
    return made


@pytest.mark.parametrize(
    ("change", "param"),
    [({"n": 2**31 - 2}, "n"), ({"n": 10_000_000}, "n"), ({"best_of": 10_000_000}, "best_of"),
     ({"n": 10_000_000, "use_beam_search": True}, "n"), ({"n": 128, "prompt": ["a"] * 5}, "n"),
     ({"n": 1, "best_of": 128, "prompt": ["a"] * 5}, "n"), ({"prompt": ["a"] * 257}, "prompt")],
)  # fmt: skip
def test_outputs_are_counted_before_anything_is_made_of_them(server, counting, jobs, change, param):
    """Also on a server that has nothing else to do: 5 prompts of 128 outputs are more than its queue ever takes."""
    tracemalloc.start()
    status, _, said = call(server, "/v1/completions", {"prompt": "a", **change})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (status, error(said)["param"]) == (400, param)
    assert (counting.seen, jobs) == (0, [])
    assert peak < 4 << 20


def test_beams_and_candidates_count_in_the_queue(folder):
    with running(folder, limits=QueueLimits(queued_requests=6), max_num_seqs=1) as server, Slow(server.engine, 0.01):
        holder = opened(server, {"prompt": "a", "max_tokens": 200, "ignore_eos": True})
        server.wait(lambda: server.loop.stats.running == 1 and server.loop.queued == (0, 0))
        second = opened(server, {"prompt": "b", "max_tokens": 2, "n": 1, "best_of": 4})
        server.wait(lambda: server.loop.queued[0] == 4)
        status, _, said = call(server, "/v1/completions", {"prompt": "c", "n": 3, "max_tokens": 2})
        assert (status, error(said)["code"]) == (503, "overloaded")
        holder.close()
        second.close()
        server.assert_idle()


def test_all_prompt_tokens_of_a_body_are_bounded_a_single_prompt_is_not(folder):
    with running(folder, limits=QueueLimits(queued_tokens=100)) as server:
        assert call(server, "/v1/completions", {"prompt": [1] * 200, "max_tokens": 1})[0] == 200
        status, _, said = call(server, "/v1/completions", {"prompt": [[1] * 60] * 2, "max_tokens": 1})
        assert (status, error(said)["param"]) == (400, "prompt")


# ---- waiting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [{"use_beam_search": True, "n": 2}, {"n": 1, "best_of": 2, "ignore_eos": True}, {"prompt": ["a", "b", "c"]}]
)
def test_what_runs_does_not_wait_for_a_first_token(folder, body):
    """Ranked outputs are told of at their end, and of several prompts the last may start when the others have ended."""
    with running(folder, max_num_seqs=1) as server:
        answers = []
        with Slow(server.engine, 0.01):
            asked = {"prompt": "a", "max_tokens": 20, **body}
            client = threading.Thread(target=lambda: answers.append(call(server, "/v1/completions", asked)))
            client.start()
            server.wait(lambda: any(stream.scheduled is not None for stream in list(server.loop._streams.values())))
            server.loop.limits = QueueLimits(first_token=0.0)
            client.join(60)
        assert answers[0][0] == 200, answers[0][2]
        server.assert_idle()


def test_what_runs_is_not_queued(folder):
    with running(folder) as server, Slow(server.engine, 0.01):
        s = opened(server, {"prompt": "a", "max_tokens": 100, "n": 1, "best_of": 4, "ignore_eos": True})
        server.wait(lambda: server.loop.stats.running == 4)
        assert server.loop.queued == (0, 0)
        s.close()
        server.assert_idle()


# ---- connections ---------------------------------------------------------------------------------------------------


def connect(server):
    host, port = urlsplit(server.url).netloc.split(":")
    s = socket.create_connection((host, int(port)))
    s.settimeout(30)
    return s


def to_the_end(s):
    said = b""
    while piece := s.recv(65536):
        said += piece
    return said


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"])
def test_a_head_that_does_not_come_ends_the_connection(server, monkeypatch, sent):
    monkeypatch.setattr("ridgeline.serve.connections.HEAD_SECONDS", 0.2)
    with connect(server) as s:
        s.sendall(sent)
        assert to_the_end(s) == b""
    server.wait(lambda: not server.server.server_state.connections)


def test_a_later_head_that_does_not_come_ends_the_connection(server, monkeypatch):
    monkeypatch.setattr("ridgeline.serve.connections.HEAD_SECONDS", 0.2)
    with connect(server) as s:
        s.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert s.recv(65536).startswith(b"HTTP/1.1 200")
        s.sendall(b"GET /health HT")
        to_the_end(s)


def test_a_body_that_does_not_come_is_told_and_ends_the_connection(server, monkeypatch):
    monkeypatch.setattr("ridgeline.serve.http.BODY_SECONDS", 0.2)
    with connect(server) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                  b"content-length: 100\r\n\r\n{")  # fmt: skip
        head, _, body = to_the_end(s).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert "did not come within" in error(body)["message"]


def test_a_refusal_waits_for_no_body(folder):
    with running(folder, keys=["k"]) as server, connect(server) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert to_the_end(s).startswith(b"HTTP/1.1 401")


def test_connections_are_bounded(folder):
    with running(folder, connections=2) as server:
        first, second = connect(server), connect(server)
        server.wait(lambda: len(server.server.server_state.connections) == 2)
        with connect(server) as third:
            head, _, body = to_the_end(third).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"retry-after" in head
        assert error(body)["code"] == "overloaded"
        first.close()
        server.wait(lambda: len(server.server.server_state.connections) == 1)
        assert call(server, "/health")[0] == 200
        second.close()
