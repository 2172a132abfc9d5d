"""What training brings back after structured pruning, and what QMoE's experts take, on the trained checkpoints.

    python benchmarks/compress_checkpoints.py runs/compress
    python benchmarks/compress_recovery.py runs/compress [--only pruned,sheared,mixture,wide] [--json FILE]

``pruned``: LLM-Pruner without a fifth of the blocks' parameters, then LoRA on the text that the checkpoint was trained
on; beside it the whole checkpoint with the same LoRA, since training longer helps that, too, and the importances that
need no data. ``sheared``: Sheared LLaMA to a target shape, then continued training, beside the same shape from random
weights with as many steps as masks and continued training took together. ``mixture``, ``wide``: experts in ternary
words; every one is decoded within a product and compared with its expanded weight, entry for entry. Perplexities are of
the text's last tenth, which no training and no calibration saw, paired window by window with the whole checkpoint's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from ridgeline.compress.calibration import HELD_OUT, held_out_windows, load_text
from ridgeline.measure.environment import fingerprint
from ridgeline.measure.perplexity import window_losses
from ridgeline.measure.stats import perplexity, perplexity_ratio
from ridgeline.nn import load_checkpoint
from ridgeline.nn.checkpoint.checkpoint import Reader
from ridgeline.nn.quant.packed_model import load_packed
from ridgeline.nn.quant.ternary import TernaryLinear
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.workload import Compress

SEQ, BATCH = 256, 8
IMPORTANCES = ("param_first", "vectorize", "l2", "random")
FAST = ("--with", "flash_attention", "--with", "mixed_precision")
"""As the checkpoint was trained."""
EXPERTS = {"ternary": "qmoe", "ternary, damped": "qmoe:damp=1", "2-bit": "qmoe:grid=2bit",
           "rounded": "qmoe:min_tokens=1000000000"}  # fmt: skip
"""The last: more tokens than there are, so that every expert is rounded to nearest on its three values."""
SHAPE = "layers=7,heads=6,intermediate=640"
"""Less than half of the parameters of the blocks of the benchmark's checkpoint."""


def ridgeline(*words: object) -> dict[str, Any]:
    """What a command says."""
    command = [sys.executable, "-m", "ridgeline", *map(str, words), "--json"]
    said: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return said


class Judge:
    """Perplexities beside a checkpoint's, on text that nothing was trained or calibrated on."""

    def __init__(self, checkpoint: Path, windows: int) -> None:
        self.checkpoint, self.spec = checkpoint, ModelSpec.from_path(checkpoint)
        w = Compress(checkpoint=str(checkpoint), seq_len=SEQ, eval_windows=windows)
        text = load_text(w, self.spec.vocab_size)
        self.windows = held_out_windows(w, text)
        self.batches = -(-int(HELD_OUT * len(text.ids)) // (SEQ * BATCH)) + 1
        """Batches at the text's end that hold all of its last tenth: training leaves them out."""
        self.dense = window_losses(load_checkpoint(checkpoint, dtype=torch.float32), self.windows)
        self.rows: dict[str, dict[str, Any]] = {"whole": self._row(self.dense, self.spec)}

    def add(self, name: str, checkpoint: Path, **said: Any) -> None:
        """A row for ``checkpoint``."""
        losses = window_losses(load_checkpoint(checkpoint, dtype=torch.float32), self.windows)
        self.rows[name] = self._row(losses, ModelSpec.from_path(checkpoint)) | said
        ratio = self.rows[name]["against_whole"]
        print(f"{name:28s} perplexity {self.rows[name]['perplexity']['value']:8.2f}, whole × {ratio['value']:.3f} "
              f"[{ratio['low']:.3f}, {ratio['high']:.3f}]", flush=True)  # fmt: skip

    def _row(self, losses: list[float], spec: ModelSpec) -> dict[str, Any]:
        ratio = perplexity_ratio(losses, self.dense)
        return {"perplexity": perplexity(losses)._asdict(), "against_whole": ratio._asdict(),
                "parameters": spec.num_parameters, "losses": losses}  # fmt: skip

    def ratio(self, a: str, b: str) -> dict[str, float]:
        """Perplexity of row ``a`` over that of ``b``."""
        return perplexity_ratio(self.rows[a]["losses"], self.rows[b]["losses"])._asdict()

    def loss(self, name: str) -> float:
        """Mean loss of a row, nats per token."""
        return sum(self.rows[name]["losses"]) / len(self.windows)


def pruned(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    judge = Judge(a.folder / "llama" / "model", a.windows)
    for importance in IMPORTANCES:
        out = folder / importance
        plan = f"llm_pruner:ratio={a.ratio},importance={importance}"
        ridgeline("compress", judge.checkpoint, "--with", plan, "--samples", 32, "--seq-len", SEQ, "--out", out)
        judge.add(f"pruned, {importance}", out, plan=[plan])
    lora = f"lora:rank={a.rank},alpha={2 * a.rank},targets=all-linear"
    first = f"pruned, {IMPORTANCES[0]}"
    for name, source in (("pruned", folder / IMPORTANCES[0]), ("whole", judge.checkpoint)):
        out = folder / f"{name}-lora"
        ridgeline("finetune", source, "--data", "stdlib", "--with", lora, *FAST, "--merged", "--steps", a.lora_steps,
                  "--lr", a.lora_lr, "--seq-len", SEQ, "--batch-size", BATCH, "--eval-every", 0, "--eval-batches",
                  judge.batches, "--out", out)  # fmt: skip
        judge.add(f"{name} + LoRA", out, plan=[lora], steps=a.lora_steps)
    loss, whole, trained = judge.loss(first), judge.loss("whole"), judge.loss("whole + LoRA")
    left = judge.loss("pruned + LoRA")
    gaps = {"recovered": (loss - left) / (loss - whole), "recovered_of_trained": (loss - left) / (loss - trained)}
    print(f"LoRA recovers {gaps['recovered']:.0%} of what pruning cost in loss, "
          f"{gaps['recovered_of_trained']:.0%} beside the whole model with LoRA")  # fmt: skip
    return {"rows": judge.rows, **gaps}


def sheared(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    judge = Judge(a.folder / "llama" / "model", a.windows)
    out = folder / "sheared"
    plan = f"sheared_llama:{SHAPE},steps={a.mask_steps},batch={BATCH},lr={a.mask_weights_lr},mask_lr={a.mask_lr}"
    ridgeline("compress", judge.checkpoint, "--with", plan, "--samples", a.mask_steps * BATCH, "--seq-len",
              SEQ // 2, "--out", out)  # fmt: skip
    judge.add("sheared", out, plan=[plan])
    longer = a.steps + a.mask_steps
    for name, start, steps in (("sheared, trained on", out, a.steps), ("from scratch", None, longer)):
        trained = _trained(judge, out, start, steps, a.lr, folder / name.replace(", ", "-").replace(" ", "-"))
        judge.add(name, trained, steps=steps, lr=a.lr)
    print("trained on over from scratch:", judge.ratio("sheared, trained on", "from scratch"))
    return {"rows": judge.rows, "ratio": judge.ratio("sheared, trained on", "from scratch")}


def _trained(judge: Judge, shape: Path, start: Path | None, steps: int, lr: float, out: Path) -> Path:
    """A model of the shape of checkpoint ``shape`` after ``steps`` steps, from ``start`` or from random weights."""
    file = out.with_suffix(".toml")
    lines = [f'model = "{shape}"', 'on = "local"', 'plan = ["flash_attention", "mixed_precision"]', "[workload]",
             'kind = "pretrain"', 'data = "stdlib"', f'tokenizer = "{judge.checkpoint}"', f"seq_len = {SEQ}",
             f"batch_size = {BATCH}", f"steps = {steps}", f"lr = {lr}", f"warmup_steps = {steps // 20}",
             f"eval_batches = {judge.batches}", f'checkpoint = "{start}"' if start else "seed = 1"]  # fmt: skip
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    ridgeline("train", file, "--out", out)
    return out / "model"


def mixture(a: argparse.Namespace, folder: Path, name: str = "moe") -> dict[str, Any]:
    checkpoint = a.folder / name / "model"
    judge = Judge(checkpoint, a.windows)
    for name, plan in EXPERTS.items():
        out = folder / name
        said = ridgeline("compress", checkpoint, "--with", plan, "--samples", a.samples, "--seq-len", SEQ, "--format",
                         "ridgeline", "--out", out)  # fmt: skip
        experts = [la for la in said["layers"] if ".experts." in la["layer"]]
        kinds = sorted({la["layer"].rpartition(".")[2] for la in experts})
        told = {"expert_bits": mean(la["bits"] for la in experts), "zeros": mean(la["zeros"] for la in experts),
                "layer_error": mean(la["error"] for la in experts),
                "bits": {k: mean(la["bits"] for la in experts if la["layer"].endswith(k)) for k in kinds},
                "fewest_tokens": min(la["tokens"] for la in experts),
                "checkpoint_bytes": said["checkpoint_bytes"]}  # fmt: skip
        judge.add(f"experts {name}", out, plan=[plan], **told)
        print("   ", told)
    return {"rows": judge.rows, "decoded": _exact(folder / "ternary")}


def wide(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return mixture(a, folder, "moe_wide")


def _exact(checkpoint: Path) -> dict[str, int]:
    """Every ternary expert as it is decoded on the way of a product, beside its expanded weight; both counted."""
    spec = ModelSpec.from_path(checkpoint)
    packed, dense = load_packed(checkpoint, torch.float32), Reader(checkpoint, spec)
    compared = different = 0
    for name, module in packed.named_modules():
        if not isinstance(module, TernaryLinear):
            continue
        stem, _, expert = name.rpartition(".")
        weight = dense.read(stem, int(expert))
        decoded = module(torch.eye(weight.shape[1])).t()
        compared += weight.numel()
        different += int((decoded != weight).sum())
    return {"weights": compared, "different": different}


PARTS = {"pruned": pruned, "sheared": sheared, "mixture": mixture, "wide": wide}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what compress_checkpoints.py wrote")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--windows", type=int, default=96)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lora-steps", type=int, default=200)
    parser.add_argument("--lora-lr", type=float, default=2e-3)
    parser.add_argument("--mask-steps", type=int, default=100)
    parser.add_argument("--mask-lr", type=float, default=1.0)
    parser.add_argument("--mask-weights-lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    a.folder = a.folder.resolve()
    found: dict[str, Any] = {}
    for name in a.only.split(","):
        with tempfile.TemporaryDirectory(prefix="ridgeline-") as folder:
            found[name] = PARTS[name](a, Path(folder))
        found[name] |= {"settings": {k: v for k, v in vars(a).items() if k not in ("json", "folder", "only")}}
    if a.json:
        if a.json.is_file():  # parts that were measured before, by the same command with another --only
            found = json.loads(a.json.read_text())["parts"] | found
        result = {"schema": "ridgeline.compress_recovery/1", "parts": found, "environment": fingerprint()}
        a.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
