"""Evaluating checkpoints, and ablations whose plans compress."""

import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.compress.conftest import Bench

from ridgeline import catalog, experiments
from ridgeline.compress.calibration import held_out_windows, load_text, windows_of
from ridgeline.compress.driver import compress
from ridgeline.data.tokenizer import load_tokenizer
from ridgeline.jobs.job import CellOptions, CompressOptions, EvaluateOptions, RankContext
from ridgeline.measure.ablate import run_ablation
from ridgeline.measure.cells.compression_cell import compression_cell
from ridgeline.measure.evaluation import evaluate, stored_size
from ridgeline.measure.harness import harness, require_harness
from ridgeline.measure.perplexity import window_losses
from ridgeline.measure.stats import perplexity, perplexity_ratio
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.nn.quant.packed_model import load_packed
from ridgeline.predict import predict
from ridgeline.report.charts.pareto import frontier, pareto_chart
from ridgeline.report.html import ablation_html
from ridgeline.report.tables import to_csv, to_markdown
from ridgeline.spec.errors import UserError
from ridgeline.spec.result import Result
from ridgeline.techniques.matrix import CPU
from ridgeline.techniques.registry import normalize

HERE = RankContext(torch.device("cpu"))


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("measured"))


def options(checkpoint, text, **changes):
    return EvaluateOptions(
        checkpoint=str(checkpoint), text=text, seq_len=32, windows=12, prompt_len=8, output_len=4, **changes
    )


def test_window_losses_are_cross_entropy(bench):
    model = load_checkpoint(bench.checkpoint(20))
    windows = torch.randint(0, 300, (5, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(windows[:, :-1]).double().log_softmax(-1)
    expected = -logits.gather(2, windows[:, 1:, None]).squeeze(2).mean(1)
    assert window_losses(model, windows) == pytest.approx(expected.tolist(), rel=1e-5)


def test_perplexity_and_its_interval():
    draw = np.random.default_rng(0)
    losses = (3 + 0.3 * draw.standard_normal(200)).tolist()
    found = perplexity(losses)
    assert found.value == pytest.approx(math.exp(np.mean(losses)))
    half = 1.96 * 0.3 / math.sqrt(200)
    assert math.log(found.high / found.value) == pytest.approx(half, rel=0.2)
    worse = [x + 0.01 + 0.001 * draw.standard_normal() for x in losses]
    ratio = perplexity_ratio(worse, losses)
    assert ratio.value == pytest.approx(math.exp(0.01), rel=1e-3)
    assert 1.0095 < ratio.low < ratio.value < ratio.high < 1.0105  # paired: far below the spread between windows
    with pytest.raises(ValueError, match="3 windows against 200"):
        perplexity_ratio(losses[:3], losses)


def test_evaluation_against_the_dense_model(bench, tmp_path):
    path = bench.checkpoint(20)
    bench.compress(path, tmp_path / "out", "gptq:bits=2,group_size=32")
    found = evaluate(None, options(tmp_path / "out", bench.text, against=str(path)), HERE)
    assert found["bits_per_weight"] == 2.5
    tensors = sum(f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors"))
    assert 0 < tensors - found["checkpoint_bytes"] < 20_000  # headers
    assert found["against"]["ratio"]["value"] == pytest.approx(
        found["perplexity"]["value"] / found["against"]["perplexity"]["value"]
    )
    assert found["against"]["ratio"]["low"] < found["against"]["ratio"]["value"] < found["against"]["ratio"]["high"]
    assert found["decode_tokens_per_s"] > 0
    assert stored_size(path)["bits_per_weight"] == pytest.approx(32, rel=0.01)


def test_evaluation_says_what_is_wrong(bench, tmp_path):
    path = bench.checkpoint()
    with pytest.raises(UserError, match="has 100 tokens, fewer than two windows of 64"):
        windows_of(np.arange(100), 64, 9, "short")
    small = bench.checkpoint(vocab_size=280)
    with pytest.raises(UserError, match="makes token ids up to"):
        evaluate(None, options(small, bench.text, tokenizer=str(path)), HERE)
    naked = shutil.copytree(path, tmp_path / "naked")
    (naked / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        evaluate(None, options(naked, bench.text), HERE)


def test_tasks_need_the_harness(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="lm-eval, which is not installed"):
        require_harness()


def test_tasks_of_the_harness(bench, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    place = bench.checkpoint(20)
    model, tokenizer = load_checkpoint(place), load_tokenizer(str(place))

    def worth(text, choice):
        """Log-likelihood of ``choice`` behind ``text``, of one whole pass."""
        ids, n = tokenizer.encode(text + choice).ids, len(tokenizer.encode(text).ids)
        logp = model(torch.tensor([ids])).float().log_softmax(-1)[0]
        return sum(float(logp[i - 1, ids[i]]) for i in range(n, len(ids)))

    rows = tmp_path / "rows.jsonl"
    asked = [f"number {i} is" for i in range(8)]
    with torch.no_grad():
        best = [int(worth(q, " zoo") > worth(q, " the")) for q in asked]
    right = [b if i < 6 else 1 - b for i, b in enumerate(best)]  # the last two are answered wrong
    rows.write_text("".join(json.dumps({"q": q, "gold": g}) + "\n" for q, g in zip(asked, right, strict=True)))
    task = tmp_path / "toy.yaml"
    task.write_text(
        f"task: toy\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {rows}}}\ntest_split: test\n"
        'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: [the, zoo]\ndoc_to_target: gold\n'
        "metric_list:\n  - metric: acc\n"
    )
    assert harness(place, [str(task)])["toy"] == {"acc": 0.75}


@pytest.mark.parametrize(
    ("call", "bits", "slack"),
    [
        ("gptq:bits=4,group_size=32", 4.5, 0.0),
        ("quantease:bits=4,group_size=32,outliers=0.01", 4.5 + 48 * 0.01, 2e-3),  # whole outliers in each layer
    ],
)
def test_cell_of_a_plan(bench, call, bits, slack, tmp_path):
    e = bench.experiment(bench.checkpoint(20), call, eval_windows=8)
    r = Result.model_validate(compression_cell(e, CellOptions(), HERE))
    assert r.metric("bits_per_weight") == pytest.approx(bits, rel=slack, abs=0)
    place = tmp_path / "out"
    compress(normalize(e), CompressOptions(out=str(place), resume=False), HERE)
    windows = held_out_windows(e.workload, load_text(e.workload, e.model.vocab_size))
    ids = windows.long()
    with torch.no_grad():
        logits = load_packed(place, torch.float32, fast=False)(ids[:, :-1]).flatten(0, 1)
    whole = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    assert len(r.losses) == len(ids) == 8
    assert math.log(r.metric("perplexity")) == pytest.approx(float(whole), rel=1e-5)
    assert 0 < r.metric("layer_error") < 0.1
    assert r.metric("tokens_per_s") > 0
    expected = predict(normalize(e))
    held, said = ({m.category: m.bytes for m in x.memory}["parameters"] for x in (r, expected))
    assert held == pytest.approx(said, rel=slack, abs=0)
    assert r.metric("checkpoint_bytes") == pytest.approx(expected.metric("checkpoint_bytes"), rel=slack, abs=0)


def test_a_cell_needs_a_checkpoint(bench):
    e = bench.experiment(bench.checkpoint(20), "gptq:bits=4,group_size=32")
    without = e.model_copy(update={"workload": e.workload.model_copy(update={"checkpoint": None})})
    with pytest.raises(UserError, match="no checkpoint"):
        compression_cell(without, CellOptions(), HERE)


def test_ablation_of_compressions(bench, tmp_path, monkeypatch):
    file = tmp_path / "c.toml"
    file.write_text(
        f"""
        name = "small"
        on = "local"
        [model]
        base = "llama-tiny"
        num_layers = 1
        hidden_size = 64
        num_heads = 4
        num_kv_heads = 2
        head_dim = 16
        intermediate_size = 128
        vocab_size = 300
        [workload]
        kind = "compress"
        data = {json.dumps(bench.text)}
        samples = 4
        seq_len = 32
        eval_windows = 8
        prompt_len = 8
        output_len = 4
        [measure]
        warm_start = 10
        warm_start_workload = {{ batch_size = 8, lr = 3e-3, warmup_steps = 1 }}
        repeats = 1
        memory = false
        [plans]
        dense = []
        gptq2 = ["gptq:bits=2,group_size=32"]
        """
    )
    monkeypatch.setattr(catalog, "local_device", lambda: CPU)
    spec = experiments.load_ablation(file)
    ablation = run_ablation(spec, tmp_path / "runs")
    dense, two = ablation.outcomes
    assert all(o.measured.status == "ok" for o in ablation.outcomes), [o.measured.reason for o in ablation.outcomes]
    assert dense.perplexity_ratio is None
    ratio = two.measured.metric("perplexity") / dense.measured.metric("perplexity")
    assert two.perplexity_ratio.value == pytest.approx(ratio)
    assert two.measured.metric("checkpoint_bytes") < 0.6 * dense.measured.metric("checkpoint_bytes")
    text = to_markdown(ablation)
    assert "Quality and size" in text
    assert "gptq2" in text
    assert "perplexity" in to_csv(ablation).splitlines()[0]
    assert len(pareto_chart(ablation).table.rows) == 2
    assert "Quality against size" in ablation_html(ablation, tmp_path / "r.html").read_text()


def test_frontier_is_what_nothing_beats():
    points = [("a", 4, 10.0), ("b", 3, 10.0), ("c", 2, 12.0), ("d", 1, 11.0), ("e", 5, 9.0)]
    assert frontier(points) == ["d", "b", "e"]


def test_command_line(bench, tmp_path):
    path = bench.checkpoint(20)

    def run(*args):
        command = [sys.executable, "-m", "ridgeline", *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)

    made = run("compress", path, "--with", "gptq:bits=4,group_size=32", "--calib", bench.text, "--samples", 4,
               "--seq-len", 32, "--out", tmp_path / "c4")  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert "4.50 bits per weight" in made.stdout
    judged = run("eval", tmp_path / "c4", "--text", bench.text, "--seq-len", 32, "--windows", 8, "--against", path,
                 "--output-len", 4)  # fmt: skip
    assert judged.returncode == 0, judged.stderr
    assert "paired" in judged.stdout
    again = run("compress", path, "--with", "gptq", "--out", tmp_path / "c4", "--calib", bench.text)
    assert again.returncode == 2
    assert "Traceback" not in again.stderr
