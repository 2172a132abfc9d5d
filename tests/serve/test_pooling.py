"""Embeddings, their kinds and lengths, and how similar texts are."""

import base64
import json
import struct
import urllib.request

import openai
import pytest
import torch
from tests.serve.running import running
from tests.serve.test_classify import classifier, theirs  # noqa: F401 (a fixture)
from tests.serve.test_reliability import call, error

from ridgeline.serve import reading
from ridgeline.serve.checkpoint_settings import Options, dimensions_of, pooling_of, prompts_of
from ridgeline.serve.fields import MAX_INPUTS
from ridgeline.serve.queue_limits import QueueLimits
from ridgeline.spec.errors import UserError

TEXTS = ["one text", "another one", "x"]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as c:
        yield c


def asked(server, path, **body):
    status, _, text = call(server, path, body)
    assert status == 200, text
    return json.loads(text)


def hidden(server, text):
    """Hidden states of a text [tokens, hidden], by a whole pass without a cache."""
    kept = []
    model = server.engine.model
    hook = model.head.register_forward_pre_hook(lambda module, args: kept.append(args[0][0].clone()))
    with torch.inference_mode():
        model(torch.tensor([server.service.vocabulary.encode(text)]))
    hook.remove()
    return kept[0]


@pytest.mark.parametrize("kind", ["mean", "last", "cls"])
def test_kinds_of_pooling(server, monkeypatch, kind):
    monkeypatch.setattr(server.service, "pooling", kind)
    text = "a text of more tokens than one step takes" * 3  # 64 tokens a step
    for path, field in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        found = asked(server, path, input=[text, "x"], normalize=False)["data"]
        states = hidden(server, text)
        expected = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[kind]
        torch.testing.assert_close(torch.tensor(found[0][field]), expected, rtol=1e-3, atol=1e-4)
        assert len(found) == 2


def test_one_embedding_for_each_token(server):
    text = "a text of more tokens than one step takes" * 3
    states = hidden(server, text)
    plain, whole = ({"input": [text, "x"], "task": "token_embed", "normalize": n} for n in (False, True))
    found = asked(server, "/pooling", **plain)["data"]
    torch.testing.assert_close(torch.tensor(found[0]["data"]), states, rtol=1e-3, atol=1e-4)
    assert len(found[1]["data"]) == len(server.service.vocabulary.encode("x"))
    unit = torch.nn.functional.normalize(states, dim=-1)
    torch.testing.assert_close(
        torch.tensor(asked(server, "/pooling", **whole)["data"][0]["data"]), unit, rtol=1e-3, atol=1e-4
    )
    body = json.dumps({**plain, "encoding_format": "bytes"}).encode()
    request = urllib.request.Request(server.url + "/pooling", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        content, about = reply.read(), json.loads(reply.headers["metadata"])
    (first, _) = about["data"]
    assert first["shape"] == list(states.shape)
    numbers = torch.frombuffer(bytearray(content[first["start"] : first["end"]]), dtype=torch.float32)
    torch.testing.assert_close(numbers.view(states.shape), states, rtol=1e-3, atol=1e-4)


def test_the_numbers_of_an_answer_are_bounded(server, monkeypatch):
    monkeypatch.setattr(reading, "MOST_NUMBERS", 3 * server.engine.spec.hidden_size)
    assert len(asked(server, "/pooling", input=[1, 2, 3], task="token_embed")["data"][0]["data"]) == 3
    refused(server, "/pooling", {"input": [1, 2, 3, 4], "task": "token_embed"}, "input")


@pytest.mark.parametrize(("size", "options"), [(1, {}), (5, {"use_activation": False}), (2**62, {"dimensions": 8})])
def test_late_chunking(server, monkeypatch, size, options):
    monkeypatch.setattr(server.service, "dimensions", None)
    texts = ["a text of more tokens than one step takes, with ünïcode — 中文" * 3, "x"]
    found = asked(server, "/v1/embeddings", input=texts, late_chunking_params={"chunk_size": size}, **options)
    tokenizer = server.service.vocabulary.tokenizer
    for text, entry in zip(texts, found["data"], strict=True):
        means = torch.stack([part.mean(0) for part in hidden(server, text).split(size)])[:, : options.get("dimensions")]
        if "use_activation" not in options:
            means = torch.nn.functional.normalize(means, dim=-1)
        torch.testing.assert_close(torch.tensor(entry["embedding"]), means, rtol=1e-3, atol=1e-4)
        said, offsets = entry["late_chunking"], tokenizer.encode(text).offsets
        assert (said["strategy"], said["chunk_size"], said["input_tokens"]) == ("fixed_tokens", size, len(offsets))
        starts = range(0, len(offsets), size)
        assert [c["token_range"] for c in said["chunks"]] == [[s, min(s + size, len(offsets))] for s in starts]
        for chunk in said["chunks"]:
            own = [o for o in offsets[slice(*chunk["token_range"])] if o[0] < o[1]]
            assert chunk["char_range"] == ([min(own)[0], max(b for _, b in own)] if own else None)
    assert found["usage"]["prompt_tokens"] == sum(d["late_chunking"]["input_tokens"] for d in found["data"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [1, 2]}, "late_chunking_params"),
        ({"input": ["a", ""]}, ""),
        ({"input": "a", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"input": "a", "padding": "max_length"}, "padding"),
        ({"input": "a", "late_chunking_params": {"chunk_size": 2**63}}, "late_chunking_params.chunk_size"),
        ({"input": "a", "late_chunking_params": {"chunk_size": 0}}, "late_chunking_params.chunk_size"),
        ({"messages": [{"role": "user", "content": "a"}]}, "late_chunking_params"),
    ],
)
def test_what_cannot_be_divided_into_chunks(server, body, param):
    status, _, text = call(server, "/v1/embeddings", {"late_chunking_params": {"chunk_size": 5}, **body})
    assert status == 400, text
    assert not param or json.loads(text)["error"]["param"] == param


def test_late_chunks_come_in_bytes_too(server):
    body = {"input": "several tokens", "late_chunking_params": {"chunk_size": 2}}
    plain = asked(server, "/v1/embeddings", **body)["data"][0]
    sent = json.dumps({**body, "encoding_format": "bytes"}).encode()
    request = urllib.request.Request(server.url + "/v1/embeddings", sent, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        content, (entry,) = reply.read(), json.loads(reply.headers["metadata"])["data"]
    numbers = torch.frombuffer(bytearray(content), dtype=torch.float32).view(entry["shape"])
    torch.testing.assert_close(numbers, torch.tensor(plain["embedding"]), rtol=1e-4, atol=1e-5)
    assert entry["late_chunking"] == plain["late_chunking"]


def test_prompts_are_padded_to_the_context(server, monkeypatch):
    monkeypatch.setattr(server.service, "special", {"pad_token": "<|mask|>"})
    monkeypatch.setattr(server.service, "pooling", "last")
    pad = server.service.vocabulary.tokenizer.token_to_id("<|mask|>")
    ids, length = server.service.vocabulary.encode("one text"), server.service.max_model_len
    found = asked(server, "/v1/embeddings", input="one text", padding="max_length")
    same = asked(server, "/v1/embeddings", input=[*ids, *[pad] * (length - len(ids))])
    assert found["usage"]["prompt_tokens"] == length
    assert found["data"][0]["embedding"] == pytest.approx(same["data"][0]["embedding"], abs=1e-4)
    assert asked(server, "/v1/embeddings", input="x", padding="do_not_pad")["usage"]["prompt_tokens"] < 9
    monkeypatch.setattr(reading, "MOST_PADDED", 2 * length - 1)
    refused(server, "/v1/embeddings", {"input": ["a", "b"], "padding": "max_length"}, "padding")
    monkeypatch.setattr(server.service, "special", {})
    refused(server, "/v1/embeddings", {"input": "x", "padding": "max_length"}, "padding")


def test_the_embed_api_of_cohere(server, monkeypatch):
    monkeypatch.setattr(server.service, "prompt_names", {"search_query": "query: "})
    plain = [d["embedding"] for d in asked(server, "/v1/embeddings", input=["query: a", "query: b"])["data"]]
    kinds = ["float", "base64", "binary", "ubinary"]
    found = asked(server, "/v2/embed", texts=["a", "b"], input_type="search_query", embedding_types=kinds)
    made = found["embeddings"]
    for i, vector in enumerate(plain):
        assert made["float"][i] == pytest.approx(vector, abs=1e-4)
        packed = struct.unpack(f"<{len(vector)}f", base64.b64decode(made["base64"][i]))
        assert list(packed) == pytest.approx(made["float"][i], abs=1e-6)
        bits = [bool(byte >> (7 - at) & 1) for byte in made["ubinary"][i] for at in range(8)]
        assert bits == [x >= 0 for x in made["float"][i]]
        assert made["binary"][i] == [byte - 128 for byte in made["ubinary"][i]]
    assert (found["texts"], found["meta"]["api_version"]) == (["a", "b"], {"version": "2"})
    assert found["meta"]["billed_units"]["input_tokens"] == 2 * len(server.service.vocabulary.encode("query: a"))
    parts = [{"content": [{"type": "text", "text": "query: a"}]}]
    assert asked(server, "/v2/embed", inputs=parts)["embeddings"]["float"][0] == pytest.approx(plain[0], abs=1e-4)


def test_texts_are_cut_as_cohere_has_it(server):
    long = "begin " * 200 + "end " * 200
    ids, most = server.service.vocabulary.encode(long), server.service.max_model_len
    for truncate, kept in (("END", ids[: most - 1]), ("START", ids[-most + 1 :])):
        found = asked(server, "/v2/embed", texts=[long], truncate=truncate)["embeddings"]["float"][0]
        assert found == pytest.approx(asked(server, "/v1/embeddings", input=kept)["data"][0]["embedding"], abs=1e-4)
    short = asked(server, "/v2/embed", texts=[long], max_tokens=3)
    assert short["meta"]["billed_units"]["input_tokens"] == 3
    refused(server, "/v2/embed", {"texts": [long], "truncate": "NONE"}, "texts")
    refused(server, "/v2/embed", {"texts": ["one two three"], "truncate": "NONE", "max_tokens": 1}, "texts")


@pytest.mark.parametrize(("body", "param"), [
    ({}, "texts"), ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "texts"),
    ({"texts": ["a"], "output_dimension": 7}, "output_dimension"),
    ({"images": ["x"]}, "images"), ({"texts": ["a"], "input_type": "none"}, "input_type"),
    ({"texts": ["a"], "embedding_types": ["int3"]}, "embedding_types[0]"), ({"texts": []}, "texts"),
])  # fmt: skip
def test_what_cohere_refuses(server, body, param):
    refused(server, "/v2/embed", body, param)


def test_a_checkpoint_names_its_prompts(tmp_path):
    assert prompts_of(tmp_path) == {}
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: "}}')
    assert prompts_of(tmp_path) == {"query": "q: "}


def test_shorter_embeddings(server, client, monkeypatch):
    with pytest.raises(openai.BadRequestError) as e:
        client.embeddings.create(model="tiny", input="a", dimensions=4)
    assert e.value.param == "dimensions"
    long = client.embeddings.create(model="tiny", input="a").data[0].embedding
    for allowed in (frozenset({4, 8}), None):
        monkeypatch.setattr(server.service, "dimensions", allowed)
        short = client.embeddings.create(model="tiny", input="a", dimensions=4).data[0].embedding
        norm = sum(x * x for x in long[:4]) ** 0.5
        assert short == pytest.approx([x / norm for x in long[:4]], abs=1e-5)
    for wrong in (0, 10**6):
        with pytest.raises(openai.BadRequestError, match="outside"):
            client.embeddings.create(model="tiny", input="a", dimensions=wrong)


def test_more_inputs_than_the_queue_takes(folder):
    inputs = [[1 + i % 250, 2, 3] for i in range(40)]
    with running(folder, limits=QueueLimits(queued_requests=7, queued_tokens=15)) as server:
        many = asked(server, "/v1/embeddings", input=inputs)
        assert [d["index"] for d in many["data"]] == list(range(40))
        for i in (0, 6, 39):
            alone = asked(server, "/v1/embeddings", input=inputs[i])["data"][0]["embedding"]
            assert many["data"][i]["embedding"] == pytest.approx(alone, abs=1e-5)
        assert many["usage"]["prompt_tokens"] == 120
        server.assert_idle()


def test_as_many_inputs_as_the_api_takes(server, client):
    made = client.embeddings.create(model="tiny", input=[[1 + i % 250] for i in range(MAX_INPUTS)])
    assert len(made.data) == MAX_INPUTS
    assert made.data[0].embedding == pytest.approx(made.data[250].embedding, abs=1e-5)
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.embeddings.create(model="tiny", input=[[1]] * (MAX_INPUTS + 1))


def test_scores_are_cosines(server, client):
    units = [torch.tensor(d.embedding) for d in client.embeddings.create(model="tiny", input=TEXTS).data]
    one = asked(server, "/score", text_1=TEXTS[0], text_2=TEXTS)
    assert [d["score"] for d in one["data"]] == pytest.approx([float(units[0] @ u) for u in units], abs=1e-5)
    assert [d["object"] for d in one["data"]] == ["score"] * 3
    pairs = asked(server, "/v1/score", queries=TEXTS, documents=TEXTS[1:] + TEXTS[:1])
    expected = [float(a @ b) for a, b in zip(units, units[1:] + units[:1], strict=True)]
    assert [d["score"] for d in pairs["data"]] == pytest.approx(expected, abs=1e-5)
    ranked = {}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = asked(server, path, query=TEXTS[0], documents=[TEXTS[1], {"text": TEXTS[0]}, TEXTS[2]], top_n=2)
        assert len(ranked["results"]) == 2
    best = ranked["results"][0]
    assert (best["index"], best["document"]["text"]) == (1, TEXTS[0])
    assert best["relevance_score"] == pytest.approx(1, abs=1e-5)
    assert ranked["results"][1]["relevance_score"] <= 1
    assert "document" not in asked(server, "/rerank", query="a", documents=["b"], return_documents=False)["results"][0]


def test_pooling_of_a_classifier(classifier):  # noqa: F811
    with running(classifier, kv_cache_bytes=None) as server:
        prompt = [1, 2, 3, 4]
        expected = theirs(classifier, prompt).softmax(0).tolist()
        for more in ({}, {"task": "classify"}):
            found = asked(server, "/pooling", input=prompt, **more)["data"][0]
            assert found["data"] == pytest.approx(expected, abs=1e-5)
        raw = pytest.approx(theirs(classifier, prompt).tolist(), abs=1e-5)
        assert asked(server, "/pooling", input=prompt, use_activation=False)["data"][0]["data"] == raw
        assert asked(server, "/classify", input=prompt, use_activation=False)["data"][0]["probs"] == raw
        coded = asked(server, "/pooling", input=prompt, encoding_format="base64")["data"][0]["data"]
        assert struct.unpack("<3f", base64.b64decode(coded)) == pytest.approx(expected, abs=1e-5)
        assert len(asked(server, "/pooling", input=prompt, task="embed")["data"][0]["data"]) == 32
        rows = asked(server, "/pooling", input=prompt, task="token_classify")["data"][0]["data"]
        assert [len(row) for row in rows] == [3] * 4
        assert rows[0] == pytest.approx(expected, abs=1e-5)
        assert [sum(row) for row in rows] == pytest.approx([1.0] * 4, abs=1e-5)
        refused(server, "/score", {"text_1": "a", "text_2": "b"}, "model")
        refused(server, "/pooling", {"input": prompt, "normalize": True}, "normalize")


def refused(server, path, body, param):
    status, _, text = call(server, path, body)
    assert (status, error(text)["param"]) == (400, param), text


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/score", {"text_1": "a"}, "text_1"), ("/score", {"text_1": "a", "documents": "b"}, "text_1"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
    ("/score", {"text_1": "x" * 9999, "text_2": "a"}, "text_1"),
    ("/rerank", {"query": "a", "documents": []}, "documents"),
    ("/rerank", {"query": "", "documents": ["a"]}, "query"),
    ("/rerank", {"query": "a", "documents": [""]}, "documents"),
    ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    ("/pooling", {"input": "a", "task": "x"}, "task"),
    ("/pooling", {"input": "a", "task": "classify"}, "model"),
    ("/pooling", {"input": "a", "dimensions": 4}, "dimensions"),
    ("/pooling", {"input": "a", "messages": []}, "messages"), ("/classify", {}, "input"),
    ("/pooling", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
    ("/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
    ("/pooling", {"input": "a", "truncate_prompt_tokens": 9999}, "truncate_prompt_tokens"),
    ("/rerank", {"query": "a", "documents": ["a"], "max_chunks_per_doc": 1}, "max_chunks_per_doc"),
])  # fmt: skip
def test_what_cannot_be_is_refused(server, path, body, param):
    refused(server, path, body, param)


def test_a_checkpoint_says_how_it_is_pooled(tmp_path):
    assert (pooling_of(tmp_path, None), pooling_of(tmp_path, "last")) == ("mean", "last")
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    for mode, kind in (("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "last")):
        modes = {
            f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
        }
        file.write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
        assert pooling_of(tmp_path, None) == kind
    file.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(UserError, match="--pooling mean"):
        pooling_of(tmp_path, None)
    with pytest.raises(UserError, match="mean"):
        Options(pooling="men").check()
    assert dimensions_of(tmp_path) == frozenset()
    for config, lengths in (({"matryoshka_dimensions": [4, 8]}, frozenset({4, 8})), ({"is_matryoshka": True}, None)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert dimensions_of(tmp_path) == lengths
