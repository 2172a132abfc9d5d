"""Small checkpoints with a tokenizer, and one function that compresses them as the command does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import write_corpus

from ridgeline.compress.calibration import Hidden, calibration_windows
from ridgeline.compress.driver import compress
from ridgeline.compress.walk import Walker
from ridgeline.data.batches import load_tokens
from ridgeline.jobs.job import CompressOptions, RankContext
from ridgeline.nn import build, save_checkpoint
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.runtime.compress_build import CompressBuild
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Compress
from ridgeline.techniques.matrix import CPU
from ridgeline.techniques.registry import techniques_of

LLAMA = ModelSpec(
    name="llama", family="llama", vocab_size=300, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, intermediate_size=128, max_positions=64,
)  # fmt: skip
SEQ = 32


class Bench:
    """A folder with a text and the checkpoints that were asked for; every checkpoint is made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = str(write_corpus(folder / "corpus.txt"))

    def checkpoint(self, steps: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        """A model like LLAMA with these ``changes``, trained for ``steps`` on the text."""
        name = "-".join([str(steps), str(dtype)[6:], *(f"{k}={v}" for k, v in changes.items())])[:200]  # of a file
        path = self.folder / name
        if path.exists():
            return path
        spec = LLAMA.changed(**changes)
        tokens = load_tokens(self.text, spec.vocab_size)
        model = build(spec, seed=0)
        ids = torch.from_numpy(tokens.ids.astype("int64"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        draw = torch.Generator().manual_seed(0)
        for _ in range(steps):
            starts = torch.randint(0, len(ids) - SEQ - 1, (16,), generator=draw)
            rows = torch.stack([ids[s : s + SEQ + 1] for s in starts])
            loss = torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save_checkpoint(model.to(dtype), path)
        tokens.tokenizer.save(str(path / "tokenizer.json"))
        return path

    def experiment(self, checkpoint: Path, *plan: str, **workload: Any) -> Experiment:
        """What ``ridgeline compress`` makes of these arguments."""
        fields = {"samples": 4, "seq_len": SEQ, "prompt_len": 8, "output_len": 4, **workload}
        return Experiment(
            model=ModelSpec.from_path(checkpoint), cluster=Cluster(device=CPU), plan=Plan.parse(plan),
            workload=Compress(checkpoint=str(checkpoint), data=self.text, **fields),
        )  # fmt: skip

    def compress(
        self, checkpoint: Path, out: Path, *plan: str, format: str | None = "compressed-tensors", **workload: Any
    ) -> dict[str, Any]:
        """The report of a compression into ``out``."""
        e = self.experiment(checkpoint, *plan, **workload)
        return compress(e, CompressOptions(out=str(out), format=format), RankContext(torch.device("cpu")))

    def walk(self, checkpoint: Path, *plan: str, **workload: Any) -> tuple[torch.Tensor, torch.Tensor, Walker, Any]:
        """(hidden states behind the last block as the compressed model computes them, those of the original, the
        walker, the compressed model): the driver's walk without files. Dense models only."""
        e = self.experiment(checkpoint, *plan, **workload)
        run = CompressBuild(e, e.model, torch.device("cpu"))
        for technique in techniques_of(e.plan):
            technique.compress(run)
        model = load_checkpoint(checkpoint, dtype=torch.float32).requires_grad_(False)
        tokens = load_tokens(self.text, e.model.vocab_size, str(checkpoint))
        windows = calibration_windows(e.workload, tokens)
        walker = Walker(run, model, torch.float32, lambda message: None, self.folder)
        hidden, target = (Hidden(*windows.shape, e.model.hidden_size, self.folder, name) for name in ("a", "b"))
        for stream in (hidden, target):
            walker.embed(windows, stream)
        walker.block_notes = []
        for i, block in enumerate(model.layers.values()):
            walker.pass_through(block, target)
            walker.block(i, block, hidden, target if "teacher" in run.wants else None, None)
            walker.block_notes.append(walker.notes)
        return hidden.data, target.data, walker, model

    @torch.no_grad()
    def loss(self, checkpoint: Path) -> float:
        """Mean loss of a checkpoint on the end of the text."""
        model = load_checkpoint(checkpoint, dtype=torch.float32)
        ids = torch.from_numpy(load_tokens(self.text, model.spec.vocab_size).ids[-32 * SEQ - 1 :].astype("int64"))
        logits = model(ids[:-1].view(32, SEQ))
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[1:]))


def with_outliers(checkpoint: Path, to: Path, factor: float, channels: tuple[int, ...] = (3, 20)) -> Path:
    """The same function with some large inputs: those channels of the norms times ``factor``, columns divided by it."""
    model = load_checkpoint(checkpoint, dtype=torch.float32).requires_grad_(False)
    for block in model.layers.values():
        attention, mlp = block.attention, block.mlp
        for norm, layers in (
            (block.attention_norm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.mlp_norm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight[list(channels)] *= factor
            for linear in layers:
                linear.weight[:, list(channels)] /= factor
    save_checkpoint(model, to)
    shutil.copy(checkpoint / "tokenizer.json", to)
    return to


@pytest.fixture(scope="session")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("compress"))
