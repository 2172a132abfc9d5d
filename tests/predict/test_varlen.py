"""Attention of documents and windows in training on GPUs: no mask in memory, and work as windows have it."""

import pytest

from ridgeline import catalog
from ridgeline.experiments import make
from ridgeline.graph.build_graph import training_graph
from ridgeline.predict.common import rewritten
from ridgeline.predict.predict import predict
from ridgeline.techniques.registry import resolve

WINDOW = 256
LOW = ("mixed_precision", "flash_attention")


def experiment(length, *plan, on="h100-sxm", documents=False, **changes):
    model = catalog.model("mistral-7b").model_copy(update={"sliding_window": WINDOW, "num_layers": 2, **changes})
    work = {"kind": "pretrain", "seq_len": length, "batch_size": 4, "micro_batch_size": 4, "document_mask": documents}
    return make(model, on, work, list(plan or LOW))


def buffers(e):
    return {m.category: m.bytes for m in predict(e).memory}.get("buffers", 0.0)


def attention(e):
    e, techniques = resolve(e)
    g = rewritten(training_graph(e), e, techniques)
    return [o for b in g.blocks for o in b.forward if o.name == "attention.flash"]


@pytest.mark.parametrize("length", [1024, 8192])
def test_a_window_takes_the_work_of_the_keys_that_it_shows(length):
    (windowed,), (whole,) = attention(experiment(length)), attention(experiment(length, sliding_window=None))
    seen = sum(min(i + 1, WINDOW) for i in range(length))
    part = seen / (length * (length + 1) / 2)
    assert windowed.flops / whole.flops == pytest.approx(part, rel=1.5 / WINDOW)
    assert not windowed.causal
    assert windowed.kernel == whole.kernel


def test_windows_and_documents_need_no_mask():
    plain = buffers(experiment(2048, sliding_window=None))
    for e in (
        experiment(2048),
        experiment(2048, documents=True),
        experiment(2048, documents=True, sliding_window=None),
    ):
        assert buffers(e) == plain
        assert attention(e)[0].kernel != "biased"


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        (("flash_attention",), {}),  # fp32
        (LOW, {"attention_soft_cap": 30.0}),
        ((*LOW, "torch_compile"), {}),
        (LOW, {"head_dim": 264}),
        (LOW, {"chunked_window": True}),
    ],
)
def test_others_keep_a_mask_for_each_row(plan, changes):
    e = experiment(2048, *plan, documents=True, **changes)
    assert attention(e)[0].kernel == "biased"
    assert buffers(e) >= 4 * 2048**2 * 2
