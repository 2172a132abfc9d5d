"""A checkpoint whose family is predicted, not run: whatever loads it says so, and which families run."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tests.compressing import squeeze

from ridgeline.cli import app
from ridgeline.data.batches import train_tokenizer
from ridgeline.jobs.job import EvaluateOptions, RankContext
from ridgeline.measure.evaluation import evaluate
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.nn.quant.packed_model import load_packed
from ridgeline.serve.build_engine import load_engine
from ridgeline.spec.errors import UserError
from ridgeline.train.adapter_folder import merged_model

CONFIGS = {
    "t5": {"vocab_size": 258, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
}


@pytest.fixture(params=CONFIGS)
def folder(request, tmp_path):
    """A checkpoint directory with a tokenizer, text to read, and examples to learn from."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": request.param, **CONFIGS[request.param]}))
    save_file({"x": torch.zeros(1)}, path / "model.safetensors")
    train_tokenizer(["a"], 258).save(str(path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("abcdefgh " * 1000)
    (tmp_path / "examples.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    (tmp_path / "train.toml").write_text(
        f'model = "{path}"\non = "local"\n[workload]\nkind = "pretrain"\nseq_len = 16\nbatch_size = 1\n'
    )
    return path


def command(*args):
    app(list(map(str, args)), standalone_mode=False)


LOADS = {
    "engine": load_engine,
    "checkpoint": load_checkpoint,
    "packed": load_packed,
    "compress": lambda p: squeeze(p, p.parent / "out", "rtn"),
    "eval": lambda p: evaluate(None, EvaluateOptions(checkpoint=str(p), text=str(p.parent / "text.txt")),
                               RankContext(torch.device("cpu"))),
    "merge": lambda p: merged_model(p, p),
    "generate": lambda p: command("generate", p, "--prompt", "a"),
    "serve": lambda p: command("serve", p, "--port", 0),
    "finetune": lambda p: command("finetune", p, "--data", p.parent / "examples.jsonl", "--out", p.parent / "out"),
    "train": lambda p: command("train", p.parent / "train.toml"),
}  # fmt: skip


@pytest.mark.parametrize("load", LOADS)
def test_every_path_that_loads_it_names_the_family_and_those_that_run(folder, load):
    with pytest.raises(UserError) as e:
        LOADS[load](folder)
    family = json.loads((folder / "config.json").read_text())["model_type"]
    assert f"family '{family}' is spec only" in e.value.what
    assert all(name in e.value.fix for name in ("llama", "qwen3", "mixtral", "gpt2", "opt", "bert"))
