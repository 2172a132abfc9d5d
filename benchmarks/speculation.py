"""Speculative decoding on a small model that was really trained: what is kept of drafts, and what that saves.

    python benchmarks/speculation.py TEXT [--minutes 4 2] [--json benchmarks/results/speculation.json]
    python benchmarks/speculation.py TEXT --work DIR          # keeps what was trained, and goes on from it

A llama of 14 million parameters (speculation.toml) is trained on the text in the file TEXT, all but its end, for the
first number of minutes, then a draft head for it (`eagle`) for the second. Prompts come from the end of the text,
outputs are greedy. Variants: ``plain``; ``ngram``, drafts from the text so far; ``chain`` and ``tree``, drafts by the
head, whose sizes were chosen among a few on these prompts; all with drafts in every step, whether they pay or not. They
take turns in every round, so that a disturbance hits all of them; ratios are of each round, their median with the
smallest and largest beside. Only steps in which all sequences decode are timed.

``kept``: tokens of a sequence per pass of the model. ``acceptance``: the probability for a drafted level that gives as
many (arXiv:2211.17192, equation 1), from which ``predicted`` follows, after a probe in this process: 1 where drafts do
not pay, as they are left out then. ``parts``: where the time of a pass of the head's variants goes, in passes of
``plain``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ridgeline import catalog, experiments
from ridgeline.data.tokenizer import load_tokenizer
from ridgeline.jobs.job import ProbeOptions, RankContext, TrainOptions
from ridgeline.jobs.malloc import keep_freed_memory
from ridgeline.measure.environment import fingerprint
from ridgeline.measure.probing.probe import device_of
from ridgeline.measure.probing.probe_worker import probe_rank
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.nn.model.transformer import Transformer
from ridgeline.predict import predict
from ridgeline.serve.build_engine import DEFAULT_PLAN, make_engine
from ridgeline.serve.engine import Engine
from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Serve
from ridgeline.train.training_loop import train

BATCHES = (1, 2, 4, 8)
PROMPT, OUTPUT = 32, 64
HELD_OUT = 20_000
"""Characters at the end of the text that prompts come from."""
RUN = RankContext(torch.device("cpu"), 0, 1, lambda message: None)


def variants(head: Path) -> dict[str, str]:
    """The calls of the technique by variant; plain has none."""
    return {
        "plain": "",
        "ngram": "speculative:tokens=4",
        "chain": f"speculative:draft={head},tokens=4",
        "tree": f"speculative:draft={head},tokens=3,branches=2,nodes=6",
    }


# ---- training --------------------------------------------------------------------------------------------------------


def experiment(text: Path, minutes: float, *plan: str, **workload: Any) -> Experiment:
    """The experiment file with another text and budget, and more techniques."""
    e = experiments.load(Path(__file__).with_suffix(".toml"), overrides=[f"workload.data={str(text)!r}"])
    calls = [
        *plan,
        *(c if "minutes" not in c else f"cramming:minutes={minutes},ramp=0,top=0.3" for c in e.plan.strings()),
    ]
    fields = {**e.workload.model_dump(exclude_none=True), "kind": "pretrain", **workload}
    return experiments.make(e.model.model_dump(), "local", fields, calls)


def train_base(text: Path, folder: Path, minutes: float) -> dict[str, Any]:
    """Train the model, and export it with its tokenizer."""
    return _train(experiment(text, minutes), folder)


def train_head(text: Path, base: Path, folder: Path, minutes: float) -> dict[str, Any]:
    """Train a head for it."""
    return _train(experiment(text, minutes, "eagle", checkpoint=str(base), lr=2e-3), folder)


def _train(e: Experiment, folder: Path) -> dict[str, Any]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as kept:
        done = train(e, TrainOptions(out=kept, export=str(folder)), RUN)
    losses = done["losses"]
    return {"steps": done["step"], "seconds": time.perf_counter() - start, "first_loss": losses[0],
            "last_loss": statistics.fmean(losses[-20:]), "step_tokens": e.batch_size * e.training.seq_len}  # fmt: skip


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclass
class Variant:
    """One way to decode, with its engine."""

    engine: Engine
    speeds: list[float] = field(default_factory=list)
    """Tokens a second, by round."""
    passes: list[float] = field(default_factory=list)
    """Seconds of a step, by round."""
    drafting: list[float] = field(default_factory=list)
    """Those of them in which drafts are made."""
    tokens: int = 0
    turns: int = 0
    """Passes of the model, counted for each sequence."""
    outputs: dict[str, list[int]] = field(default_factory=dict)

    @property
    def kept(self) -> float:
        """Tokens of a sequence per pass."""
        return self.tokens / self.turns


def serving(model: Transformer, base: Path, device: Device, call: str, **fields: Any) -> Experiment:
    """Serving the model with a variant's technique."""
    w = Serve(**{"checkpoint": str(base), "prompt_len": PROMPT, "output_len": OUTPUT, "kv_cache_bytes": 1 << 28,
                 "dtype": "fp32", **fields})  # fmt: skip
    plan = Plan.parse([*DEFAULT_PLAN, *([call] if call else [])])
    return Experiment(model=model.spec, cluster=Cluster(device=device), workload=w, plan=plan)


def started(model: Transformer, base: Path, device: Device, call: str) -> Variant:
    """A variant that drafts in every step."""
    found = Variant(make_engine(serving(model, base, device, call), torch.device("cpu"), model))
    drafter = found.engine.drafter
    if drafter is not None:
        drafter.tokens = lambda running: drafter.most if running else 0  # type: ignore[method-assign]
        inner = drafter.propose

        def timed(seqs: Any, most: list[int]) -> Any:
            start = time.perf_counter()
            drafts = inner(seqs, most)
            found.drafting[-1] += time.perf_counter() - start
            return drafts

        drafter.propose = timed
    return found


def decode(v: Variant, prompts: list[list[int]]) -> None:
    """Serve the prompts at once; the time of steps in which all decode."""
    engine = v.engine
    for i, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(i), prompt, Sampling(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)))
    seconds, made, steps = 0.0, 0, 0
    v.drafting.append(0.0)
    outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while engine.has_work():
        running = engine.scheduler.running
        whole = len(running) == len(prompts) and all(s.generated for s in running)
        before = v.drafting[-1]
        start = time.perf_counter()
        events = engine.step()
        taken = time.perf_counter() - start
        for e in events:
            outputs[e.request] += e.tokens
        if not whole:
            v.drafting[-1] = before
            continue
        new = sum(len(e.tokens) for e in events)
        seconds, made, steps = seconds + taken, made + new, steps + 1
    v.speeds.append(made / seconds)
    v.passes.append(seconds / steps)
    v.drafting[-1] /= steps
    v.tokens, v.turns = v.tokens + made, v.turns + steps * len(prompts)
    v.outputs = outputs


def measured(model: Transformer, base: Path, calls: dict[str, str], device: Device, prompts: list[list[int]],
             rounds: int) -> dict[str, Variant]:  # fmt: skip
    """All variants on one batch, in turns."""
    found = {name: started(model, base, device, call) for name, call in calls.items()}
    for v in found.values():  # once more than is counted: kernels and memory are there then
        decode(v, prompts)
        v.speeds, v.passes, v.drafting, v.tokens, v.turns = [], [], [], 0, 0
    for _ in range(rounds):
        for v in found.values():
            decode(v, prompts)
    for name, v in found.items():
        assert v.outputs == found["plain"].outputs, f"{name} changes tokens"
    return found


def acceptance(kept: float, tokens: int) -> float:
    """The probability a for which 1 + a + … + a^tokens is ``kept``."""
    low, high = 0.0, 1.0
    for _ in range(50):
        a = (low + high) / 2
        low, high = (a, high) if sum(a**i for i in range(tokens + 1)) < kept else (low, a)
    return low


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def row(found: dict[str, Variant], calls: dict[str, str], base: Path, model: Transformer, device: Device,
        batch: int) -> dict[str, Any]:  # fmt: skip
    """What one batch gave."""
    plain = found["plain"]
    out: dict[str, Any] = {}
    load = {"engine": "ridgeline", "concurrency": batch, "requests": 2 * batch}

    def predicted(call: str) -> float:
        return predict(serving(model, base, device, call, **load)).metrics["tpot_s"].value

    before = predicted("")
    for name, v in found.items():
        ratios = [a / b for a, b in zip(v.speeds, plain.speeds, strict=True)]
        out[name] = {"tokens_per_s": spread(v.speeds), "step_s": spread(v.passes)}
        if name == "plain":
            out[name]["predicted_step_s"] = before
            continue
        tokens = v.engine.drafter.most  # type: ignore[union-attr]
        a = acceptance(v.kept, tokens)
        parts = [d / b for d, b in zip(v.drafting, plain.passes, strict=True)]
        whole = [p / b for p, b in zip(v.passes, plain.passes, strict=True)]
        out[name] |= {
            "speedup": spread(ratios), "kept": v.kept, "acceptance": a,
            "parts": {"drafting": statistics.median(parts),
                      "checking": statistics.median([w - p for w, p in zip(whole, parts, strict=True)])},
            "predicted": before / predicted(f"{calls[name]},acceptance={min(a, 0.999):.4f}"),
        }  # fmt: skip
    return out


def tell(batch: int, name: str, told: dict[str, Any]) -> None:
    """One row of the results, in a line."""
    line = f"batch {batch} {name:6} {told['tokens_per_s']['median']:7.1f} tokens/s"
    if "speedup" in told:
        ratio, parts = told["speedup"], told["parts"]
        line += (
            f"  {ratio['median']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}], predicted {told['predicted']:.2f}x"
        )
        line += f"  {told['kept']:.2f} tokens a pass, acceptance {told['acceptance']:.2f}"
        line += f"  drafting {parts['drafting']:.2f}, checking {parts['checking']:.2f} passes"
    print(line, flush=True)


def main() -> None:
    """Train, measure, predict, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--minutes", type=float, nargs=2, default=(4.0, 2.0), help="for the model, and for its head")
    parser.add_argument("--work", type=Path, help="folder for what is trained")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    keep_freed_memory()
    catalog.allow_unprobed()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        result = run(args.text, work, args.minutes, args.rounds)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run(text: Path, work: Path, minutes: tuple[float, float], rounds: int) -> dict[str, Any]:
    """The whole benchmark in the folder ``work``."""
    whole = text.read_text(encoding="utf-8")
    shown = work / "text.txt"
    shown.write_text(whole[:-HELD_OUT], encoding="utf-8")
    base, head, about = work / "base", work / "head", work / "training.json"
    training = json.loads(about.read_text()) if about.exists() else {}
    if "model" not in training:
        training["model"] = train_base(shown, base, minutes[0])
        about.write_text(json.dumps(training))
    if "head" not in training:
        training["head"] = train_head(shown, base, head, minutes[1])
        about.write_text(json.dumps(training))
    model = load_checkpoint(base).requires_grad_(False)
    ids = load_tokenizer(str(base)).encode(whole[-HELD_OUT:], add_special_tokens=False).ids
    prompts = [ids[at : at + PROMPT] for at in range(0, max(BATCHES) * 2 * PROMPT, 2 * PROMPT)]
    parts = [probe_rank(None, ProbeOptions(quick=True, serving=s), RUN) for s in (False, True)]
    device = device_of({1: parts[0] | parts[1]})
    calls = variants(head)
    rows = {}
    for batch in BATCHES:
        found = measured(model, base, calls, device, prompts[:batch], rounds)
        rows[str(batch)] = row(found, calls, base, model, device, batch)
        for name, told in rows[str(batch)].items():
            tell(batch, name, told)
    plans = {name: call.replace(str(head), "HEAD") for name, call in calls.items()}
    environment = {**fingerprint(), "threads": torch.get_num_threads()}
    return {"environment": environment, "parameters": model.spec.num_parameters, "training": training,
            "plans": plans, "prompt": PROMPT, "output": OUTPUT, "rounds": rounds, "batches": rows}  # fmt: skip


if __name__ == "__main__":
    main()
