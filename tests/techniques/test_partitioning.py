"""NLP-Fast's partitioning: `feed_forward_splitting` and `partial_head_update`."""

import itertools
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ridgeline import experiments
from ridgeline.graph import prefill_graph
from ridgeline.jobs.job import CellOptions, RankContext
from ridgeline.measure.cells.generation_cell import generation_cell
from ridgeline.measure.probing.cache_size import SIZES, cache_bytes
from ridgeline.nn.model.generate import decode, make_cache, prefill
from ridgeline.nn.model.init import build
from ridgeline.predict import predict
from ridgeline.runtime.build import Build
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible
from ridgeline.techniques.kernels.partial_head_update import computed
from ridgeline.techniques.kernels.piece_sizes import attention_piece, feed_forward_piece
from ridgeline.techniques.matrix import CPU
from ridgeline.techniques.registry import check, normalize, resolve

FFN = "feed_forward_splitting:rows=7,columns=50"
HEADS = "partial_head_update:rows=5,keys=6"
LENGTH = 33


def experiment(*plan, model="llama-tiny", **workload):
    fields = {"kind": "generate", "prompt_len": LENGTH, "output_len": 4, "batch_size": 2, "dtype": "fp32", **workload}
    e = experiments.make(model, "a100", fields, list(plan))
    return e.model_copy(update={"cluster": Cluster(device=CPU)})


def built(e, dtype=torch.float32):
    e, techniques = resolve(e)
    model = build(e.model, torch.device("cpu"), dtype, 0)
    model.set_attention("naive")
    model.requires_grad_(False)
    run = Build(e, model, torch.device("cpu"))
    for t in techniques:
        t.apply(run)
    return model


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny"])  # grouped heads and gates; biases and one head each
@pytest.mark.parametrize(
    "plan",
    [(FFN,), (HEADS,), (FFN, HEADS), ("partial_head_update", "flash_attention"), (HEADS, "kv_quant")],
    ids=" ".join,
)
def test_logits_are_those_of_whole_layers(model, plan):
    base = [c for c in plan if c not in (FFN, HEADS)]
    whole, split = built(experiment(*base, model=model)), built(experiment(*plan, model=model))
    ids = torch.randint(whole.spec.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[0, :9] = False
    for padding in (None, real):
        a, b = (m(ids, attention_mask=padding) for m in (whole, split))
        torch.testing.assert_close(a[real], b[real], rtol=1e-4, atol=1e-5)
    caches = [make_cache(m, 2, LENGTH + 6) for m in (whole, split)]
    tokens = [prefill(m, ids[:, :20], c) for m, c in zip((whole, split), caches, strict=True)]
    torch.testing.assert_close(*tokens, rtol=1e-4, atol=1e-5)
    for m, c in zip((whole, split), caches, strict=True):  # a chunk behind a cache, then a token
        m(ids[:, 20:], cache=c)
    last = [decode(m, ids[:, 0], c) for m, c in zip((whole, split), caches, strict=True)]
    torch.testing.assert_close(*last, rtol=1e-4, atol=1e-5)


def test_a_window_a_scale_and_bf16():
    spec = experiment(model="mistral-7b").model.changed(
        num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, vocab_size=128,
        sliding_window=10, attention_multiplier=0.2,
    )  # fmt: skip
    e = experiment().model_copy(update={"model": spec})
    split = e.model_copy(update={"plan": experiment(FFN, HEADS).plan})
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 128
    exact = built(e, torch.float64)(ids)
    torch.testing.assert_close(exact, built(split, torch.float64)(ids), rtol=1e-6, atol=1e-6)
    low = [(built(x, torch.bfloat16)(ids).double() - exact).norm() / exact.norm() for x in (e, split)]
    assert low[1] < 1.2 * low[0], "sums of pieces are kept in fp32: no further from the truth than whole layers"


def test_flops_of_skipped_blocks_are_not_done():
    e = normalize(experiment("partial_head_update:rows=8,keys=8", batch_size=1, prompt_len=64))
    model, ids = built(e), torch.zeros(1, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids)
    g = prefill_graph(e)
    for t in check(e):
        g = t.rewrite(g, e)
    head = sum(o.flops for b in g.blocks if b.name == "head" for o in b.forward)
    logits = 2 * 64 * e.model.hidden_size * e.model.vocab_size  # the model computes all, generation the last row's
    assert counter.get_total_flops() == pytest.approx(g.close().flops - head + logits)


@pytest.mark.parametrize(("queries", "keys", "rows", "columns"), [(9, 9, 2, 4), (8, 8, 8, 3), (5, 12, 2, 5)])
def test_computed_fraction_by_counting(queries, keys, rows, columns):
    cells = 0
    for first, left in itertools.product(range(0, queries, rows), range(0, keys, columns)):
        last = min(queries, first + rows)
        if left <= keys - queries + last - 1:  # some query of the block sees its first key
            cells += (last - first) * (min(keys, left + columns) - left)
    assert computed(queries, keys, rows, columns) == pytest.approx(cells / (queries * keys))


def test_pieces_fit_and_move_the_least():
    for tokens, share in itertools.product((100, 4096), (1e5, 2e6, 6e7)):
        rows, columns = feed_forward_piece(tokens, 512, 2048, 2, 4.0, share)
        assert rows * columns * 8 <= share

        def moved(r, c, tokens=tokens):
            return 3 * 512 * 2048 * math.ceil(tokens / r) + 3 * tokens * 512 * math.ceil(2048 / c)

        grid = [(math.ceil(tokens / 2**i), 2048 // 2**j) for i in range(7) for j in range(6)]
        grid = [(r, c) for r, c in grid if r >= min(64, tokens) and r * c * 8 <= share]
        assert moved(rows, columns) <= min(moved(r, c) for r, c in grid)
    rows, columns = attention_piece(8, 4096, 4096, 4.0, 2e6)
    assert rows * columns * 8 * 8 <= 2e6


def test_the_peak_falls_as_predicted(monkeypatch):
    monkeypatch.setattr("ridgeline.measure.cells.generation_cell.ROUNDS", 1)  # times are not looked at
    peaks = {}
    for name, plan in {"whole": (), "heads": (HEADS,), "both": (HEADS, FFN)}.items():
        e = experiment(*plan, prompt_len=128, output_len=2, batch_size=2)
        found = generation_cell(e, CellOptions(), RankContext(torch.device("cpu")))
        measured, predicted = found["metrics"]["peak_bytes"]["value"], predict(e).metrics["peak_bytes"].value
        assert predicted == pytest.approx(measured, rel=0.15), name
        peaks[name] = measured
    assert peaks["both"] < peaks["heads"] < peaks["whole"]


def test_cache_sizes():
    assert cache_bytes(dict.fromkeys(SIZES, 1e10)) == 0, "no cache shows"
    rates = {size: 1e11 if size <= 1 << 22 else 1e10 for size in SIZES}
    assert cache_bytes(rates) == 1 << 22
    assert cache_bytes() in (0, *SIZES)


@pytest.mark.parametrize(
    ("plan", "model", "why"),
    [
        (["partial_head_update:heads=2"], "llama-tiny", "does not divide"),
        ([HEADS, "flash_attention"], "llama-tiny", "has its own blocks"),
        (["feed_forward_splitting"], "mixtral-tiny", "have experts"),
        (["feed_forward_splitting", "rtn"], "llama-tiny", "stores the projections in codes"),
        (["partial_head_update", "rtn"], "llama-tiny", "stores the projections in codes"),
    ],
)
def test_refusals(plan, model, why):
    with pytest.raises(Incompatible, match=why):
        resolve(experiment(*plan, model=model))
