"""The literature's orderings of compression methods, on a trained checkpoint and text that calibration never saw.

    ridgeline train llama-tiny --steps 3000 --out runs/small      # or any other trained decoder with its tokenizer
    python benchmarks/compress_orderings.py runs/small/model [--seeds 5] [--bits 4,3,2] [--only REGEX] [--json FILE]

Every plan compresses the checkpoint once for each calibration seed (once in all if it uses no data). Perplexity is
taken on the same held-out windows; two plans are compared window by window, each window's loss being the mean over
seeds, with the 95 % bootstrap interval over windows. An ordering "holds" where that interval lies below 1, is
"reversed" where it lies above, and is a "tie" else; beside it stands for how many seeds the first was the better one.
FineQuant is compared with round-to-nearest at equal bytes: with the losses of its two group sizes that store the next
fewer and the next more bits, weighted so that the bits are equal. Small models have no outliers, so plans that quantize
inputs are also run on the same function with some planted among the inputs, and FineQuant with some in a third of the
weights. QuantEase and GPTQ are also compared by what both minimize, the layer error under the same H.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from ridgeline.compress.calibration import held_out_windows, load_text
from ridgeline.compress.driver import compress
from ridgeline.jobs.job import CompressOptions, RankContext
from ridgeline.measure.environment import fingerprint
from ridgeline.measure.perplexity import window_losses
from ridgeline.measure.stats import perplexity, perplexity_ratio
from ridgeline.nn import load_checkpoint, save_checkpoint
from ridgeline.nn.quant.packed_model import load_packed
from ridgeline.runtime.solve.fold import readers
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Compress
from ridgeline.techniques.matrix import CPU

NO_DATA = ("rtn", "finequant", "magnitude")
"""Techniques whose result is the same whatever the calibration text."""
PAPERS = "norm_tweaking:distance=channels,passes=1"
"""Norm Tweaking as the paper has it."""
FACTOR, SHARE = 40.0, 0.01
"""Planted outliers among inputs: by how much, and how many of a norm's channels."""
WEIGHT_FACTOR, EVERY = 8.0, 3
"""Planted outliers among weights: by how much, and in one block of how many."""
SIZES = (0, 128, 64, 32)
"""Group sizes of round-to-nearest beside FineQuant; 0: whole rows."""


def weight_plans(bits: int, group: int) -> dict[str, list[str]]:
    grid = f"bits={bits},group_size={group},symmetric=false"
    return {
        "rtn mse": [f"rtn:{grid},mse=true"], "rtn + norms": [f"rtn:{grid}", "norm_tweaking"],
        "rtn + paper's norms": [f"rtn:{grid}", PAPERS],
        "awq": [f"awq:{grid}"],
        "gptq in order": [f"gptq:{grid},act_order=false"], "gptq": [f"gptq:{grid}"],
        "gptq + norms": [f"gptq:{grid}", "norm_tweaking"], "gptq + paper's norms": [f"gptq:{grid}", PAPERS],
        "quantease cold": [f"quantease:{grid},start=cold,passes=25"], "quantease": [f"quantease:{grid}"],
        "quantease outliers": [f"quantease:{grid},outliers=0.01"],
    }  # fmt: skip


def weight_orderings(bits: int) -> list[tuple[str, str]]:
    """(better, worse), as the papers have it."""
    pairs = [
        ("rtn", "rtn rows"), ("awq", "rtn"), ("gptq", "rtn"), ("gptq", "gptq in order"),
        ("quantease", "gptq"), ("quantease cold", "gptq in order"), ("quantease outliers", "quantease"),
        ("rtn + norms", "rtn"), ("gptq + norms", "gptq"),
        ("rtn + paper's norms", "rtn"), ("gptq + paper's norms", "gptq"),
    ]  # fmt: skip
    return [(f"{a} {bits}", f"{b} {bits}") for a, b in pairs]


def ladder(bits: int, group: int) -> dict[str, list[str]]:
    """Round-to-nearest at every group size."""
    names = {0: "rtn rows", group: "rtn"}
    return {f"{names.get(g, f'rtn {g}')} {bits}": [f"rtn:bits={bits},group_size={g},symmetric=false"]
            for g in sorted({*SIZES, group})}  # fmt: skip


def granular_plans(bits: int, group: int) -> dict[str, list[str]]:
    """FineQuant at two thresholds, and what it is set against."""
    grid = f"bits={bits},group_size={SIZES[-1]},symmetric=false"
    return ladder(bits, group) | {f"finequant {bits}": [f"finequant:{grid}"],
                                  f"finequant 0.95 {bits}": [f"finequant:{grid},alpha=0.95"]}  # fmt: skip


def pruning_plans(group: int) -> dict[str, list[str]]:
    plans = {f"{m} {p}": [f"{m}:pattern={o}"] for m in ("magnitude", "wanda", "sparsegpt")
             for p, o in (("50%", "unstructured"), ("2:4", "2:4"))}  # fmt: skip
    grid = f"bits=4,group_size={group},symmetric=false"
    return plans | {"sparsegpt 50% + gptq 4": ["sparsegpt", f"gptq:{grid}"],
                    "sparsegpt 50% + rtn 4": ["sparsegpt", f"rtn:{grid}"]}  # fmt: skip


PRUNING_ORDERINGS = [
    (f"{a} {p}", f"{b} {p}") for p in ("50%", "2:4") for a, b in (("wanda", "magnitude"), ("sparsegpt", "wanda"))
] + [("sparsegpt 50% + gptq 4", "sparsegpt 50% + rtn 4")]


def input_plans(group: int) -> dict[str, list[str]]:
    return {
        "w4a8 static": [f"fptq:group_size={group},low=1e9,high=1e9"], "fptq": [f"fptq:group_size={group}"],
        "fptq + gptq": [f"fptq:group_size={group},solver=gptq"], "int8": ["smooth_int8:threshold=0"],
        "llm.int8": ["smooth_int8"], "smoothquant": ["smooth_int8:threshold=0,alpha=0.5"],
    }  # fmt: skip


PARTS = ("as_trained", "outliers_in_inputs", "outliers_in_weights")
INPUT_ORDERINGS = [("fptq", "w4a8 static"), ("fptq + gptq", "fptq"), ("llm.int8", "int8"), ("smoothquant", "int8")]


@torch.no_grad()
def plant_outliers(source: Path, to: Path, factor: float, every: int) -> Path:
    """The same function: in every so many blocks the first channels of the norms before linear layers times
    ``factor``, and the columns that read them divided by it."""
    model = load_checkpoint(source, dtype=torch.float32)
    count = max(1, round(SHARE * model.spec.hidden_size))
    for block in list(model.layers.values())[::every]:
        for norm, site in ((block.attention_norm, "attention.qkv"), (block.mlp_norm, "mlp.up")):
            norm.weight[:count] *= factor
            for linear in readers(block, site):
                linear.weight[:, :count] /= factor
    save_checkpoint(model, to)
    shutil.copy(source / "tokenizer.json", to)
    return to


class Runs:
    """Plans of one checkpoint, each compressed and judged for every seed."""

    def __init__(self, checkpoint: Path, args: argparse.Namespace, folder: Path) -> None:
        self.checkpoint, self.folder, self.args = checkpoint, folder, args
        self.spec = ModelSpec.from_path(checkpoint)
        w = self.workload(0)
        self.windows = held_out_windows(w, load_text(w, self.spec.vocab_size))
        self.dense = window_losses(load_checkpoint(checkpoint, dtype=torch.float32), self.windows)
        self.rows: dict[str, dict] = {}

    def workload(self, seed: int) -> Compress:
        a = self.args
        return Compress(checkpoint=str(self.checkpoint), data=a.data, samples=a.samples, seq_len=a.seq_len, seed=seed,
                        eval_windows=a.windows, prompt_len=8, output_len=4)  # fmt: skip

    def run(self, name: str, plan: list[str]) -> None:
        needs_data = not all(p.split(":")[0] in NO_DATA for p in plan)
        seeds = range(self.args.seeds if needs_data else 1)
        losses, reports = [], []
        for seed in seeds:
            out = self.folder / "out"
            e = Experiment(model=self.spec, cluster=Cluster(device=CPU), workload=self.workload(seed),
                           plan=Plan.parse(plan))  # fmt: skip
            options = CompressOptions(out=str(out), format="ridgeline", resume=False)
            reports.append(compress(e, options, RankContext(torch.device("cpu"))))
            inputs = json.loads((out / "config.json").read_text()).get("quantization_config", {}).get("inputs")
            model = load_packed(out, torch.float32, fast=False) if inputs else load_checkpoint(out, torch.float32)
            losses.append(window_losses(model, self.windows))
            shutil.rmtree(out)
        mean = np.mean(losses, axis=0).tolist()
        ratio = perplexity_ratio(mean, self.dense)
        errors = [[la["error"] for la in r["layers"] if la["error"] is not None] for r in reports]
        descents = [la["objective"][1] / la["objective"][0] for r in reports for la in r["layers"] if "objective" in la]
        self.rows[name] = {
            "plan": plan, "perplexity": perplexity(mean)._asdict(), "against_dense": ratio._asdict(),
            "bits_per_weight": reports[0]["bits_per_weight"], "zeros": reports[0]["zeros"],
            "layer_error": float(np.mean(errors)) if errors[0] else None,
            "descent": {"layers": len(descents), "rose": sum(d > 1 for d in descents),
                        "median_ratio": float(np.median(descents))} if descents else None,
            "seconds": float(np.median([r["seconds"] for r in reports])),
            "per_seed": [perplexity_ratio(one, self.dense).value for one in losses], "losses": losses,
        }  # fmt: skip
        value, low, high = (100 * (v - 1) for v in ratio)
        print(f"{name:28s} {value:+8.2f} % [{low:+.2f}, {high:+.2f}]  {reports[0]['bits_per_weight']:.2f} bits  "
              f"{self.rows[name]['seconds']:.1f} s", flush=True)  # fmt: skip

    def equal_bytes(self, name: str) -> str | None:
        """A row of the mean of those two of the ladder between which the bits of row ``name`` lie; None: of none."""
        bits = self.rows[name]["bits_per_weight"]
        rungs = sorted((self.rows[n]["bits_per_weight"], n) for n in ladder(int(name.split()[-1]), self.args.group_size)
                       if n in self.rows)  # fmt: skip
        for (low, below), (high, above) in pairwise(rungs):
            if low <= bits <= high:
                share = (bits - low) / (high - low)
                losses = [np.average([self.rows[n]["losses"][0] for n in (below, above)], axis=0,
                                     weights=(1 - share, share)).tolist()]  # fmt: skip
                made = f"{below} × {1 - share:.2f} + {above} × {share:.2f}"
                self.rows[made] = {"bits_per_weight": bits, "losses": losses}
                return made
        return None

    def ordering(self, better: str, worse: str) -> dict:
        a, b = (self.rows[n]["losses"] for n in (better, worse))
        ratio = perplexity_ratio(np.mean(a, axis=0).tolist(), np.mean(b, axis=0).tolist())
        verdict = "holds" if ratio.high < 1 else "reversed" if ratio.low > 1 else "tie"
        both = max(len(a), len(b))
        wins = sum(np.mean(a[i % len(a)]) < np.mean(b[i % len(b)]) for i in range(both))
        return {"better": better, "worse": worse, "ratio": ratio._asdict(), "verdict": verdict, "seeds_won": int(wins),
                "seeds": both}  # fmt: skip


def measured(
    checkpoint: Path, args: argparse.Namespace, plans: dict[str, list[str]], pairs: list, folder: Path, before: dict
) -> dict:  # fmt: skip
    """All plans of one checkpoint that ``--only`` names, the rows that ``before`` has, and their orderings."""
    runs = Runs(checkpoint, args, folder)
    for name, plan in plans.items():
        if before.get(name, {}).get("plan") == plan:
            runs.rows[name] = before[name]
        elif re.search(args.only, name):
            runs.run(name, plan)
    for name in [n for n in runs.rows if n.startswith("finequant")]:
        mean = runs.equal_bytes(name)
        pairs = [*pairs, (name, mean)] if mean else pairs
    found = [runs.ordering(a, b) for a, b in pairs if a in runs.rows and b in runs.rows]
    for o in found:
        value, low, high = o["ratio"].values()
        print(f"{o['better']:>26s} < {o['worse']:26s} {o['verdict']:9s} {value:.4f} [{low:.4f}, {high:.4f}]"
              f"  {o['seeds_won']} of {o['seeds']} seeds")  # fmt: skip
    return {"dense_perplexity": perplexity(runs.dense)._asdict(), "windows": len(runs.windows),
            "dense_losses": runs.dense, "rows": runs.rows, "orderings": found}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data", default="stdlib", help="text to calibrate on; its end is held out")
    parser.add_argument("--bits", default="4,3,2")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="regular expression over the rows' names")
    parser.add_argument("--json", type=Path, help="result; rows that it has from the same settings are kept")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the order of sums moves 2-bit results
    settings = {k: str(v) for k, v in vars(args).items() if k not in ("json", "checkpoint", "only")}
    before = json.loads(args.json.read_text()) if args.json and args.json.is_file() else {}
    if before.get("settings") != settings:
        before = {}
    rows = {part: before.get(part, {}).get("rows", {}) for part in PARTS}
    bits = [int(b) for b in args.bits.split(",")]
    granular = {n: p for b in bits for n, p in granular_plans(b, args.group_size).items()}
    plans = granular | {f"{n} {b}": p for b in bits for n, p in weight_plans(b, args.group_size).items()}
    pairs = [pair for b in bits for pair in weight_orderings(b)]
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as name:
        folder = Path(name)
        whole = measured(args.checkpoint, args, plans | pruning_plans(args.group_size) | input_plans(args.group_size),
                         pairs + PRUNING_ORDERINGS, folder, rows["as_trained"])  # fmt: skip
        print("with outliers planted among the inputs")
        planted = plant_outliers(args.checkpoint, folder / "inputs", FACTOR, 1)
        outliers = measured(planted, args, input_plans(args.group_size), INPUT_ORDERINGS, folder,
                            rows["outliers_in_inputs"])  # fmt: skip
        print("with outliers planted among the weights")
        planted = plant_outliers(args.checkpoint, folder / "weights", 1 / WEIGHT_FACTOR, EVERY)
        weights = measured(planted, args, granular, [], folder, rows["outliers_in_weights"])
    result = {
        "schema": "ridgeline.compress_orderings/1", "model": json.loads((args.checkpoint / "config.json").read_text()),
        "settings": settings,
        "planted": {"share": SHARE, "inputs_factor": FACTOR, "weights_factor": WEIGHT_FACTOR, "weights_every": EVERY},
        **dict(zip(PARTS, (whole, outliers, weights), strict=True)), "environment": {**fingerprint(), "threads": 1},
    }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
