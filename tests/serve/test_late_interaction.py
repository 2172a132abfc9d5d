"""ColBERT's checkpoints: a vector of each token, and scores of texts by the most similar ones, as in transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.graph.test_flops import counted
from tests.serve.running import running
from tests.serve.test_reliability import call, error

from ridgeline.data.batches import train_tokenizer
from ridgeline.graph.build_graph import tokens_graph
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from ridgeline.nn.model.init import build
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec

SPEC = {
    "family": "bert", "vocab_size": 258, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4,
    "head_dim": 8, "intermediate_size": 48, "max_positions": 64, "norm": "layernorm", "activation": "gelu",
    "gated": False, "position": "learned", "qkv_bias": True, "out_bias": True, "mlp_bias": True, "causal": False,
    "post_norm": True, "token_types": 2, "embedding_norm": True, "final_norm": False, "tie_embeddings": False,
    "head": "project", "projection_size": 12,
}  # fmt: skip
QUERY, DOCUMENTS = "what is it", ["it is that", "nothing", "what is it"]


@pytest.fixture(scope="module")
def colbert(tmp_path_factory):
    """A checkpoint whose configuration does not tell the width, as the published ones'."""
    folder = tmp_path_factory.mktemp("colbert") / "tiny"
    save_checkpoint(build(ModelSpec(**SPEC), seed=1), folder)
    config = json.loads((folder / "config.json").read_text())
    del config["projection_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    train_tokenizer(["a"], 258).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def serving(colbert):
    with running(colbert) as s:
        yield s


@pytest.fixture(scope="module")
def vectors(colbert, serving):
    """transformers' vectors of a text's tokens, of length 1."""
    model = pytest.importorskip("transformers").AutoModel.from_pretrained(colbert).eval()
    weight = load_file(colbert / "model.safetensors")["linear.weight"]

    def of(text):
        ids = torch.tensor([serving.service.vocabulary.encode(text)])
        with torch.no_grad():
            return torch.nn.functional.normalize(model(ids).last_hidden_state[0] @ weight.T, dim=-1)

    return of


def asked(server, path, **body):
    status, _, text = call(server, path, body)
    assert status == 200, text
    return json.loads(text)


def test_scores_are_those_of_transformers(serving, vectors):
    expected = [float((vectors(QUERY) @ vectors(d).T).max(1).values.sum()) for d in DOCUMENTS]
    found = [d["score"] for d in asked(serving, "/v1/score", queries=QUERY, documents=DOCUMENTS)["data"]]
    assert found == pytest.approx(expected, rel=1e-4)
    pairs = asked(serving, "/score", text_1=[QUERY, "nothing"], text_2=DOCUMENTS[:2])["data"]
    assert pairs[0]["score"] == pytest.approx(expected[0], rel=1e-4)
    ranked = asked(serving, "/rerank", query=QUERY, documents=DOCUMENTS, top_n=2)["results"]
    order = sorted(range(3), key=lambda i: -expected[i])[:2]
    assert [r["index"] for r in ranked] == order
    assert ranked[0]["relevance_score"] == pytest.approx(len(QUERY), rel=1e-4)  # each token beside itself
    serving.assert_idle()


def test_vectors_of_tokens(serving, vectors):
    for body in ({"task": "token_embed"}, {}):
        (made,) = asked(serving, "/pooling", input=QUERY, **body)["data"]
        assert torch.tensor(made["data"]).numpy() == pytest.approx(vectors(QUERY).numpy(), abs=1e-5)


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/embeddings", {"input": QUERY}), ("/pooling", {"input": QUERY, "task": "embed"}),
    ("/v1/embeddings", {"input": QUERY, "late_chunking_params": {"chunk_size": 2}}),
    ("/classify", {"input": QUERY}), ("/v1/completions", {"prompt": QUERY}),
])  # fmt: skip
def test_what_such_a_model_does_not_do(serving, path, body):
    status, _, text = call(serving, path, body)
    assert status == 400
    assert error(text)["param"] in ("model", "late_chunking_params")


def test_the_width_comes_from_the_weights(colbert, tmp_path):
    spec = ModelSpec.from_path(colbert)
    assert (spec.head, spec.projection_size) == ("project", 12)
    save_checkpoint(load_checkpoint(colbert), tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors")["linear.weight"].equal(
        load_file(colbert / "model.safetensors")["linear.weight"]
    )
    with pytest.raises(UserError, match="how wide"):
        ModelSpec.from_path(colbert / "config.json")


def test_the_graph_counts_the_projection_of_every_token():
    spec = ModelSpec(**SPEC)
    model = build(spec, seed=0)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {p.name: p.shape for p in spec.parameters()}
    with torch.no_grad():
        work, _ = counted(lambda: model(torch.zeros(2, 9, dtype=torch.long)))
    assert tokens_graph(spec, 2, 9, 9, "fp32").flops == work
