"""PowerInfer: the same logits when nothing is skipped or activity is foreseen, more error at higher thresholds, the
placement against brute force, and what a load of a checkpoint keeps."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.compressing import LLAMA, checkpoint

from ridgeline import catalog, experiments
from ridgeline.measure.cells.generation_cell import build_generation
from ridgeline.nn.memory.meter import Meter
from ridgeline.nn.model.generate import decode, make_cache, prefill
from ridgeline.predict import predict
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.techniques.matrix import CPU
from ridgeline.techniques.memory import hot_neurons_torch
from ridgeline.techniques.memory.hot_neurons_torch import Predictor, train_predictor
from ridgeline.techniques.memory.neuron_placement import place_neurons
from ridgeline.techniques.registry import resolve

OPT = {**{k: v for k, v in LLAMA.items() if k != "num_kv_heads"}, "family": "opt", "num_layers": 3, "num_kv_heads": 4,
       "position": "learned", "position_offset": 2, "norm": "layernorm", "activation": "relu", "gated": False,
       "qkv_bias": True, "out_bias": True, "mlp_bias": True, "tie_embeddings": True}  # fmt: skip
IDS = torch.randint(258, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("opt") / "m", OPT)


@pytest.fixture(scope="module")
def home(_homes):
    folder = next(_homes)
    (folder / "taken").touch()  # no other test's
    return folder


@pytest.fixture(autouse=True)
def cache(home, monkeypatch, _own_home):
    """One for all tests: a profile takes a second to make."""
    monkeypatch.setenv("RIDGELINE_HOME", str(home))


def built(source, *options, **work):
    """The experiment, and the builder of its model; without options the plan is empty."""
    w = {"kind": "generate", "checkpoint": str(source), "batch_size": 2, "prompt_len": 8, "output_len": 4, **work}
    plan = [f"hot_neurons:tokens=256,{','.join(options)}"] if options else []
    e, techniques = resolve(experiments.make(str(source), Cluster(device=CPU), w, plan))
    return e, build_generation(e, torch.device("cpu"), techniques)


@torch.inference_mode()
def logits(model):
    """Of a prefill of 20 rows, more than are predicted for, and of two decode steps."""
    cache = make_cache(model, 2, 12)
    found = [prefill(model, IDS[:, :10], cache)]
    return torch.cat([*found, *(decode(model, IDS[:, i], cache) for i in (10, 11))])


@pytest.mark.parametrize("hot", [0, 0.3, 1])
def test_nothing_changes_where_all_neurons_are_computed(source, hot):
    _, whole = built(source)
    _, run = built(source, f"hot={hot}", "threshold=0")
    torch.testing.assert_close(logits(run.model), logits(whole.model))
    assert run.metrics["hot_share"]() == pytest.approx(hot, abs=0.02)


def test_nothing_changes_where_activity_is_foreseen(source):
    """An oracle in place of the predictors: what it leaves out is exactly zero."""
    _, whole = built(source)
    _, run = built(source, "hot=0.3", "threshold=0.5")
    for block in run.model.layers.values():
        mlp = block.mlp
        mlp.predictor.logits = lambda x, mlp=mlp: torch.where(F.linear(x, mlp.cold_up, mlp.cold_bias) > 0, 9.0, -9.0)
    torch.testing.assert_close(logits(run.model), logits(whole.model))
    assert 0 < run.metrics["computed_cold_share"]() < 1


def test_a_higher_threshold_computes_less_and_errs_more(source):
    want = logits(built(source)[1].model)
    rows = []
    for threshold in (0.01, 0.35, 0.6, 0.99):
        _, run = built(source, "hot=0.3", f"threshold={threshold}")
        error = float((logits(run.model) - want).norm() / want.norm())
        rows.append((run.metrics["computed_cold_share"](), error))
    assert [share for share, _ in rows] == sorted((share for share, _ in rows), reverse=True)
    assert [error for _, error in rows] == sorted(error for _, error in rows)
    assert rows[0][1] < rows[-1][1]


def test_a_predictor_learns_what_a_low_rank_rule_activates():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 32, generator=g)
    rule = torch.randn(4, 32, generator=g).T @ torch.randn(4, 200, generator=g)
    active = x @ rule > 12.0
    assert 0.05 < active.float().mean() < 0.3
    predictor = Predictor(32, 16, 200)
    train_predictor(predictor, x[:2500], active[:2500])
    with torch.no_grad():
        chosen = predictor.logits(x[2500:]).sigmoid() > 0.3
    recall = float((chosen & active[2500:]).sum() / active[2500:].sum())
    assert recall > 0.8
    assert float(chosen.float().mean()) < 2 * float(active[2500:].float().mean())


@pytest.mark.parametrize(("seed", "least"), [(0, 0), (1, 0), (2, 3), (3, 5)])
def test_placement_against_brute_force(seed, least):
    rng = np.random.default_rng(seed)
    frequencies = [rng.random(n) ** 3 for n in (6, 8, 5)]
    size, budget = [3.0, 2.0, 4.0], 24.0
    best = 0.0
    for counts in itertools.product(*(range(len(f) + 1) for f in frequencies)):
        allowed = all(n == 0 or n >= min(least, len(f)) for n, f in zip(counts, frequencies, strict=True))
        if allowed and sum(n * s for n, s in zip(counts, size, strict=True)) <= budget:
            best = max(best, _gain(frequencies, counts))
    found = place_neurons(frequencies, size, budget, least)
    assert sum(n * s for n, s in zip(found, size, strict=True)) <= budget
    assert all(n == 0 or n >= min(least, len(f)) for n, f in zip(found, frequencies, strict=True))
    assert _gain(frequencies, found) == pytest.approx(best, rel=1e-3)


def _gain(frequencies, counts):
    return sum(np.sort(f)[::-1][:n].sum() for f, n in zip(frequencies, counts, strict=True))


@pytest.mark.parametrize("hot", [0.25, 0.75])
def test_no_more_weights_on_the_device_than_predicted(source, hot):
    e, run = built(source, f"hot={hot}")
    meter = Meter(run.model)
    meter.register(run.model.parameters(), "parameters")
    with meter:
        logits(run.model)
    predicted = next(m.bytes for m in predict(e).memory if m.category == "parameters")
    biases = 3 * 2 * OPT["intermediate_size"] * 4  # predictors' biases, which the graph leaves out, and rounding
    assert meter.peak.categories["parameters"] == pytest.approx(predicted, abs=biases)


def test_the_next_load_finds_its_profile(source, monkeypatch):
    _, first = built(source, "hot=0.3", "threshold=0.3")
    want = logits(first.model)
    monkeypatch.setattr(hot_neurons_torch, "profile_tokens", None)  # cannot be called
    _, again = built(source, "hot=0.3", "threshold=0.3")
    torch.testing.assert_close(logits(again.model), want)
    with pytest.raises(TypeError):
        built(source, "hot=0.4", "threshold=0.3")


def test_a_damaged_profile_is_made_again(source, home):
    _, first = built(source, "hot=0.3", "threshold=0.3")
    for file in (home / "cache" / "hot-neurons").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    _, again = built(source, "hot=0.3", "threshold=0.3")
    torch.testing.assert_close(logits(again.model), logits(first.model))


def test_a_profile_of_text(source, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    own, other = (built(source, "hot=0.3", *more)[1] for more in ((), (f"profile={text}",)))
    assert own.metrics["hot_coverage"]() != other.metrics["hot_coverage"]()
    bare = checkpoint(tmp_path / "bare", OPT)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="needs a checkpoint with a tokenizer"):
        built(bare, "hot=0.3", f"profile={text}")


def test_refusals():
    with pytest.raises(Incompatible, match="no plain ReLU"):
        experiments.make("llama2-7b", "a100", {"kind": "generate"}, ["hot_neurons"])
    with pytest.raises(Incompatible, match="do not come singly"):
        experiments.make("opt-6.7b", "a100", {"kind": "generate"}, ["hot_neurons", "rtn"])


# ---- predicted -------------------------------------------------------------------------------------------------------


DESKTOP = catalog.cluster("rtx4090-i9-13900k")


def opt_30b(*options):
    w = {"kind": "generate", "prompt_len": 64, "output_len": 64, "batch_size": 1, "dtype": "fp16"}
    return experiments.make("opt-30b", DESKTOP, w, [f"hot_neurons:{','.join(options)}", "flash_attention"])


def test_auto_is_the_fastest_share_that_fits():
    def rate(share):
        found = predict(opt_30b(f"hot={share}"))
        return found.metrics["tokens_per_s"].value if found.status == "ok" else 0.0

    (chosen,) = (c.options["hot"] for c in opt_30b("hot=auto").plan.calls if c.name == "hot_neurons")
    others = [rate(k / 20) for k in range(21)]
    assert rate(chosen) >= 0.98 * max(others)
    assert 0.0 in others, "not all of them fit"


def test_more_on_the_device_is_faster_and_the_rest_waits_for_host_memory():
    seconds = [predict(opt_30b(f"hot={h}")).metrics["tpot_s"].value for h in (0, 0.05, 0.1)]
    assert seconds == sorted(seconds, reverse=True)
    dense = predict(opt_30b("hot=0", "threshold=0")).metrics["tpot_s"].value
    m = catalog.model("opt-30b")
    assert dense > m.num_layers * 2 * m.hidden_size * m.intermediate_size * 2 / DESKTOP.device.host.memory_bandwidth
    assert seconds[0] < 0.25 * dense
