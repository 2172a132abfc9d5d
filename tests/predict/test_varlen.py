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
        (("flash_attention",), {"attention_soft_cap": 30.0}),
        (("flash_attention",), {"chunked_window": True}),
        (LOW, {"head_dim": 264}),
        (("mixed_precision", "flash_attention:generation=1"), {"position": "alibi"}),
    ],
)
def test_others_keep_a_mask_for_each_row(plan, changes):
    e = experiment(2048, *plan, documents=True, **changes)
    assert attention(e)[0].kernel == "biased"
    assert buffers(e) >= 4 * 2048**2 * 2


@pytest.mark.parametrize(
    ("plan", "documents", "changes"),
    [
        (LOW, False, {"attention_soft_cap": 30.0, "window_every": 2}),
        (LOW, True, {"attention_soft_cap": 30.0, "sliding_window": None}),
        (LOW, False, {"position": "alibi", "sliding_window": None}),
        (LOW, True, {"chunked_window": True}),
        ((*LOW, "torch_compile"), True, {}),
    ],
)
def test_our_kernel_needs_no_mask_and_computes_scores_again(plan, documents, changes):
    """Beside PyTorch's kernel for the model without what it lacks: the same in forward, and two products more."""
    plain = {n: v for n, v in changes.items() if n in ("sliding_window", "window_every")}
    e = experiment(2048, *plan, documents=documents, **changes)
    theirs = experiment(2048, *LOW, documents=documents, **plain)
    assert buffers(e) <= buffers(theirs)  # ALiBi has no rotary tables
    mine, known = (rewritten_ops(x) for x in (e, theirs))
    assert {o.kernel for o in mine} == {o.kernel for o in known}
    again = [o for o in mine if o.name == "attention.flash.scores"]
    assert again
    for o in again:
        (forward,) = {f.flops for f in mine if f.name == "attention.flash" and f.shape == o.shape}
        assert (o.flops, o.recompute) == (forward, True)
    assert len(again) == len([o for o in known if o.name == "attention.flash.bwd"])
    if not changes.get("chunked_window"):
        assert [o.flops for o in mine if not o.recompute] == [o.flops for o in known]


def test_a_chunk_takes_half_the_keys_of_a_window():
    (chunked,), (windowed,) = attention(experiment(8192, chunked_window=True)), attention(experiment(8192))
    assert chunked.flops / windowed.flops == pytest.approx(0.5, rel=WINDOW / 8192)


def rewritten_ops(e):
    e, techniques = resolve(e)
    g = rewritten(training_graph(e), e, techniques)
    return [o for b in g.blocks for o in (*b.forward, *b.backward) if o.name.startswith("attention.flash")]
