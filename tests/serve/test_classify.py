"""Encoders with a classifier: the hub's format both ways, the packed batch, and the route."""

import json

import pytest
import torch
from tests.serve.running import running
from tests.serve.test_reliability import call, error
from tests.serving import engine, model, run
from tests.training import experiment

from ridgeline.data.batches import train_tokenizer
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from ridgeline.serve.request import EngineRequest, Invalid
from ridgeline.serve.service import Labels
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.registry import check

transformers = pytest.importorskip("transformers")
NAMES = ["good", "bad", "neither"]
PROMPTS = [[(3 * j + i) % 250 for j in range(3 + 9 * i)] for i in range(5)]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """transformers' own classifier with random weights, as it saves it, and a tokenizer."""
    path = tmp_path_factory.mktemp("classifier")
    config = transformers.BertConfig(
        vocab_size=258, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, id2label=dict(enumerate(NAMES)), label2id={n: i for i, n in enumerate(NAMES)},
    )  # fmt: skip
    torch.manual_seed(0)
    made = transformers.BertForSequenceClassification(config)
    for p in made.parameters():
        p.data.mul_(4 if p.dim() > 1 else 1)  # random weights with opinions
    made.save_pretrained(path)
    train_tokenizer(["a"], 258).save(str(path / "tokenizer.json"))
    return path


def theirs(folder, prompt):
    made = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return made(torch.tensor([prompt])).logits[0]


def test_checkpoints_of_classifiers_go_both_ways(classifier, tmp_path):
    spec = ModelSpec.from_path(classifier)
    assert (spec.head, spec.num_labels, spec.tie_embeddings) == ("classify", 3, False)
    made = load_checkpoint(classifier, dtype=torch.float32)
    assert sum(p.numel() for p in made.parameters()) == spec.num_parameters
    save_checkpoint(made, tmp_path / "back")
    for prompt in PROMPTS[1:3]:
        with torch.inference_mode():
            ours = made(torch.tensor([prompt]))[0, 0]
        torch.testing.assert_close(ours, theirs(classifier, prompt), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(theirs(tmp_path / "back", prompt), ours, rtol=1e-4, atol=1e-5)


def test_a_packed_batch_is_classified_and_embedded():
    made = model("bert-tiny", head="classify", num_labels=5)
    asked = [EngineRequest(f"{i}c", p, embed=True, classify=True) for i, p in enumerate(PROMPTS)]
    asked += [EngineRequest(f"{i}e", p, embed=True) for i, p in enumerate(PROMPTS)]
    _, events = run(engine(made, max_num_batched_tokens=70), *asked)
    assert len(events) == len(asked)
    for e in events:
        prompt = torch.tensor([PROMPTS[int(e.request[0])]])
        with torch.inference_mode():
            hidden = made(prompt, return_hidden=True)[0]
            want = made.head(hidden)[0] if e.request.endswith("c") else hidden.mean(0)
        torch.testing.assert_close(torch.tensor(e.embedding, dtype=torch.float64), want, check_dtype=False)


def test_who_has_no_classes_says_so():
    eng = engine(model("bert-tiny"))
    with pytest.raises(Invalid, match="has no classes"):
        eng.add(EngineRequest("c", [1, 2], embed=True, classify=True))
    assert not eng.has_work()


def test_the_route_names_the_likeliest_class(classifier):
    with running(classifier, kv_cache_bytes=None) as server:
        for asked in (["one text", "x" * 40, "y"], [[1, 2, 3, 4], [5]], "one text"):
            status, _, text = call(server, "/classify", {"input": asked})
            assert status == 200, text
            answer, inputs = json.loads(text), [asked] if isinstance(asked, str) else asked
            prompts = [server.service.vocabulary.encode(t, True) if isinstance(t, str) else t for t in inputs]
            assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
            assert [d["index"] for d in answer["data"]] == list(range(len(inputs)))
            for said, prompt in zip(answer["data"], prompts, strict=True):
                probs = theirs(classifier, prompt).softmax(0)
                assert said["probs"] == pytest.approx(probs.tolist(), abs=1e-5)
                assert (said["label"], said["num_classes"]) == (NAMES[int(probs.argmax())], 3)
        status, _, text = call(server, "/v1/embeddings", {"input": "one text"})
        assert (status, len(json.loads(text)["data"][0]["embedding"])) == (200, 32)
        assert call(server, "/classify", {"input": "x" * 900})[0] == 400


def test_a_decoder_has_no_classes_over_http(server):
    status, _, text = call(server, "/classify", {"input": "a text"})
    assert (status, error(text)["param"]) == (400, "model")


def test_labels_that_exclude_each_other_and_labels_that_do_not():
    one = Labels.of({"id2label": {"0": "a", "1": "b"}}, 2)
    assert (one.names, one.apart) == (("a", "b"), False)
    assert one.probabilities([0.0, 1000.0]) == [0.0, 1.0]
    several = Labels.of({"problem_type": "multi_label_classification"}, 2)
    assert (several.names, several.apart) == (("LABEL_0", "LABEL_1"), True)
    assert several.probabilities([0.0, -1000.0]) == [0.5, 0.0]
    assert Labels.of({}, 1).apart


def test_a_classifier_is_not_trained_as_a_language_model(tmp_path):
    e = experiment(tmp_path / "text", model=model("bert-tiny", head="classify", num_labels=2).spec)
    with pytest.raises(Incompatible, match="is a classifier"):
        check(e)


@pytest.fixture(scope="module")
def cross(tmp_path_factory):
    """transformers' own cross-encoder (one class), whose tokenizer tells both texts of a pair apart."""
    from tokenizers import processors

    path = tmp_path_factory.mktemp("cross")
    config = transformers.BertConfig(vocab_size=258, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                     intermediate_size=48, max_position_embeddings=64, num_labels=1)  # fmt: skip
    torch.manual_seed(1)
    made = transformers.BertForSequenceClassification(config)
    for p in made.parameters():
        p.data.mul_(4 if p.dim() > 1 else 1)
    made.save_pretrained(path)
    tokenizer = train_tokenizer(["a"], 258)
    start, end = ("C", tokenizer.token_to_id("C")), ("S", tokenizer.token_to_id("S"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="C $A S", pair="C $A S $B:1 S:1", special_tokens=[start, end]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@torch.inference_mode()
def logit(folder, pair, most=None):
    """transformers' logit of a pair, cut as its tokenizers cut."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    more = {} if most is None else {"truncation": "longest_first", "max_length": most}
    given = tokenizer(*pair, return_token_type_ids=True, return_tensors="pt", **more)
    assert 1 in given["token_type_ids"]
    made = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return made(given["input_ids"], token_type_ids=given["token_type_ids"]).logits[0, 0]


def test_a_cross_encoder_scores_pairs(cross):
    first, second = "what is it", ["it is this", "no", "that is a longer text than others"]
    with running(cross, kv_cache_bytes=None, max_num_batched_tokens=128) as server:
        for pair in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
            body = {pair[0]: first, pair[1]: second}
            got = [d["score"] for d in json.loads(call(server, "/score", body)[2])["data"]]
            assert got == pytest.approx([float(logit(cross, (first, s)).sigmoid()) for s in second], abs=1e-5)
        ask = {"query": first, "documents": second}
        ranked = json.loads(call(server, "/rerank", {**ask, "use_activation": False})[2])["results"]
        raw = sorted(((float(logit(cross, (first, s))), i) for i, s in enumerate(second)), reverse=True)
        assert [r["index"] for r in ranked] == [i for _, i in raw]
        assert [r["relevance_score"] for r in ranked] == pytest.approx([x for x, _ in raw], abs=1e-5)
        for most in (12, 25, 30):
            body = {"text_1": first, "text_2": second[2], "truncate_prompt_tokens": most, "use_activation": False}
            reply = json.loads(call(server, "/score", body)[2])
            assert reply["usage"]["prompt_tokens"] == most
            assert reply["data"][0]["score"] == pytest.approx(float(logit(cross, (first, second[2]), most)), abs=1e-5)
        short = json.loads(call(server, "/rerank", {**ask, "max_tokens_per_doc": 2})[2])
        assert short["usage"]["prompt_tokens"] == 3 * (len(first) + 3 + 2)
        _, _, text = call(server, "/score", {"text_1": "a" * 60, "text_2": "b" * 9})
        assert error(text)["code"] == "context_length_exceeded"
        assert (
            call(server, "/invocations", ask)[2].split('"results"')[1]
            == call(server, "/rerank", ask)[2].split('"results"')[1]
        )
        server.assert_idle()


def test_kinds_of_tokens_reach_padded_batches_too(cross):
    plans = ([], ["-padding_free"], ["length_aware_memory"])
    kinds = [[0] * 4 + [1] * (n - 4) for n in (9, 20, 14)]
    prompts = [[(7 * j + i) % 250 for j in range(len(k))] for i, k in enumerate(kinds)]
    made = load_checkpoint(cross, dtype=torch.float64)
    for plan in plans:
        eng = engine(made, *plan)
        requests = [EngineRequest(str(i), p, embed=True, classify=True, token_types=k if i != 1 else [])
                    for i, (p, k) in enumerate(zip(prompts, kinds, strict=True))]  # fmt: skip
        found = {e.request: e.embedding for e in run(eng, *requests)[1]}
        for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True)):
            given = None if i == 1 else torch.tensor([kind])
            with torch.inference_mode():
                expected = made(torch.tensor([prompt]), token_types=given)[0, 0].tolist()
            assert found[str(i)] == pytest.approx(expected, abs=1e-9), plan
