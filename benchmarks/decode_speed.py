"""Decode speed of a Llama of 100M random weights: plain fp32 and bf16 against weights in int8 and int4 codes; one run.

Measured by ``generate``, operator by operator, and by a step of the serving engine, which computes all layers in one
kernel (``engine``); both with the same batch.

Variants take turns in every round, so that a disturbance hits all of them; a round's time is that of its quickest
token, as other work on the machine only adds. Ratios are of medians over rounds, with the smallest and largest of any
round beside them. The roof is the time that reading all that a token needs (every weight but the table of tokens, the
cache) takes at the rate of a copy, measured in every round. Predictions come from a probe taken in the same process. On
the CPU, with the threads that torch has. The file keeps a run for each CPU and instruction set; smaller sets are
measured under ATEN_CPU_CAPABILITY=avx2 with ONEDNN_MAX_CPU_ISA=AVX2.

    python benchmarks/decode_speed.py [--rounds 5] [--tokens 16] [--out benchmarks/results/decode_speed.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ridgeline.jobs.job import ProbeOptions, RankContext
from ridgeline.jobs.malloc import keep_freed_memory
from ridgeline.measure.cells.generation_cell import timed_generation
from ridgeline.measure.environment import fingerprint
from ridgeline.measure.probing.probe import device_of
from ridgeline.measure.probing.probe_worker import probe_rank
from ridgeline.nn.kernels import native
from ridgeline.nn.model.init import DTYPES, build
from ridgeline.nn.model.transformer import Transformer
from ridgeline.nn.quant.torch_codes import wide_dtype
from ridgeline.predict import predict
from ridgeline.runtime.train_build import Build
from ridgeline.serve.build_engine import make_engine
from ridgeline.serve.engine import Engine
from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Generate, Serve
from ridgeline.techniques.registry import check, default_plan, normalize

MODEL = ModelSpec(
    name="bench-100m", family="llama", vocab_size=8000, hidden_size=1024, num_layers=8, num_heads=16, num_kv_heads=4,
    head_dim=64, intermediate_size=2816, max_positions=1024, tie_embeddings=True,
)  # fmt: skip
PROMPT = 64
VARIANTS: dict[str, tuple[str, list[str]]] = {
    "fp32": ("fp32", []),
    "bf16": ("bf16", []),
    "int8": ("fp32", ["rtn:bits=8"]),
    "int4, groups of 128": ("fp32", ["rtn:bits=4,group_size=128"]),
    "int4, cache in int8": ("fp32", ["rtn:bits=4,group_size=128", "kv_quant:dtype=int8"]),
}


def experiment(device: Device, dtype: str, plan: list[str], tokens: int, batch: int) -> Experiment:
    """One variant's experiment."""
    w = Generate(prompt_len=PROMPT, output_len=tokens, batch_size=batch, dtype=dtype)  # type: ignore[arg-type]
    return normalize(Experiment(model=MODEL, cluster=Cluster(device=device), workload=w, plan=Plan.parse(plan)))


def model_of(e: Experiment) -> Transformer:
    """The model with the plan's techniques, as a generation cell builds it."""
    model = build(e.model, "cpu", DTYPES[e.dtype])
    model.set_attention("naive")
    model.requires_grad_(False)
    run = Build(e, model, torch.device("cpu"))
    for technique in check(e):
        technique.build(run)
    return run.model


def engine_of(device: Device, dtype: str, plan: list[str], batch: int) -> Engine:
    """A serving engine with what ``ridgeline serve`` has by default, whose sequences are all decoding."""
    w = Serve(prompt_len=PROMPT, output_len=512, max_num_seqs=batch, max_num_batched_tokens=batch * PROMPT, dtype=dtype,
              max_model_len=1024)  # type: ignore[arg-type]  # fmt: skip
    whole = Plan.parse([*plan, *default_plan("serve")])
    e = normalize(Experiment(model=MODEL, cluster=Cluster(device=device), workload=w, plan=whole))
    engine = make_engine(e, torch.device("cpu"))
    for i in range(batch):
        sampling = Sampling(max_tokens=512, temperature=0.0, ignore_eos=True)
        engine.add(EngineRequest(str(i), [i + 1] * PROMPT, sampling))
    engine.step()
    return engine


def instructions() -> str:
    """What our kernels and PyTorch's products use of the CPU."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    parts = [native.instructions(), "amx" if wide_dtype() is torch.bfloat16 else "", f"oneDNN {limit}" if limit else ""]
    return " + ".join(filter(None, parts))


def copy_rate() -> float:
    """Bytes/s that a copy of a large tensor reads and writes, now: the rate changes with what else a machine does."""
    a = torch.ones(2**25)
    b, taken = torch.empty_like(a), []
    for _ in range(5):
        start = time.perf_counter()
        b.copy_(a)
        taken.append(time.perf_counter() - start)
    return 2 * a.numel() * a.element_size() / statistics.median(taken)


def step_of(engine: Engine, steps: int) -> float:
    """Seconds of the quickest of some steps."""
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - start)
    return min(taken)


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--tokens", type=int, default=16)
    args.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    args.add_argument("--out", default="benchmarks/results/decode_speed.json")
    given = args.parse_args()
    keep_freed_memory()
    cpu = torch.device("cpu")
    parts = [probe_rank(None, ProbeOptions(quick=True, serving=s), RankContext(cpu)) for s in (False, True)]
    device = device_of({1: parts[0] | parts[1]})
    result: dict = {
        "environment": {**fingerprint(), "threads": torch.get_num_threads()}, "instructions": instructions(),
        "rounds": given.rounds,
        "parameters": MODEL.num_parameters, "prompt": PROMPT, "tokens": given.tokens,
        "copy_bandwidth": device.memory_bandwidth, "copy_rates": {}, "batches": {},
    }  # fmt: skip
    for batch in given.batch:
        asked = {name: experiment(device, *v, given.tokens, batch) for name, v in VARIANTS.items()}
        models = {name: model_of(e) for name, e in asked.items()}
        engines = {name: engine_of(device, *v, batch) for name, v in VARIANTS.items()}
        steps: dict[str, list[float]] = {name: [] for name in models}
        prompt = torch.randint(MODEL.vocab_size, (batch, PROMPT), generator=torch.Generator().manual_seed(0))
        times: dict[str, list[float]] = {name: [] for name in models}
        first: dict[str, list[float]] = {name: [] for name in models}
        rates: list[float] = []
        with torch.inference_mode():
            for r in range(given.rounds + 1):
                rates += [copy_rate()] if r else []
                for name, model in models.items():
                    taken = timed_generation(model, prompt, given.tokens)
                    if r:
                        first[name].append(taken[0])
                        times[name].append(min(taken[1:]))
                        steps[name].append(step_of(engines[name], given.tokens))
        rows, result["copy_rates"][str(batch)] = result["batches"].setdefault(str(batch), {}), rates
        for name, model in models.items():
            held = sum(p.numel() * p.element_size() for p in model.parameters())
            each = statistics.median(times[name])
            ratios = [a / b for a, b in zip(times["fp32"], times[name], strict=True)]
            said = predict(asked[name]).metrics["tpot_s"].value
            step = statistics.median(steps[name])
            shares = [held / a / b for a, b in zip(rates, steps[name], strict=True)]
            rows[name] = {
                "seconds_per_token": each, "speedup": statistics.median(times["fp32"]) / each, "lowest": min(ratios),
                "highest": max(ratios), "parameter_bytes": held,
                "share_of_roof": statistics.median(held / a / b for a, b in zip(rates, times[name], strict=True)),
                "prefill_s": statistics.median(first[name]), "predicted_seconds_per_token": said,
                "predicted_over_measured": said / each, "engine_s": step, "engine_lowest": min(steps[name]),
                "engine_highest": max(steps[name]), "engine_share_of_roof": statistics.median(shares),
                "engine_share_lowest": min(shares), "engine_share_highest": max(shares),
            }  # fmt: skip
            row = rows[name]
            print(f"batch {batch} {name:22} {1e3 * each:7.1f} ms/token  {row['speedup']:.2f}x [{row['lowest']:.2f}, "
                  f"{row['highest']:.2f}]  {held / 2**20:6.1f} MiB  {row['share_of_roof']:.0%} of the roof  prefill "
                  f"{1e3 * row['prefill_s']:.0f} ms  predicted {said / each - 1:+.0%}  engine {1e3 * step:.1f} ms, "
                  f"{row['engine_share_of_roof']:.0%} of the roof")  # fmt: skip
    keep_run(Path(given.out), result)


def keep_run(file: Path, result: dict[str, Any]) -> None:
    """Write ``result`` to ``file``, which keeps a run for each CPU and instruction set."""
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.exists() else {}
    runs[f"{result['environment']['cpu']}, {result['instructions']}"] = result
    file.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
