"""A realistic ablation for the report's tests: eight plans, one of which runs out of memory. Deterministic."""

from __future__ import annotations

import numpy as np

from ridgeline.measure.stats import bootstrap_ci, ratio_ci, step_blocks, verdict
from ridgeline.spec.ablation import Ablation, Outcome
from ridgeline.spec.result import Check, Memory, Metric, Result, Row, Sample

MIB = 2**20
TOKENS = 4096
ENVIRONMENT = {
    "cpu": "Intel(R) Xeon(R) Platinum 8488C", "cores": 8, "memory_bytes": 64 * 2**30, "python": "3.11.9",
    "torch": "2.13.0", "ridgeline": "0.1.0", "code": "3f9a21c04d7e", "threads": 8, "ranks": 1, "device": "cpu",
    "peak_flops": {"fp32": 9.2e11, "bf16": 2.6e12}, "memory_bandwidth": 8.1e10,
}  # fmt: skip
# plan → (techniques, measured step s, predicted step s, memory in MiB: parameters, gradients, optimizer, activations)
PLANS = {
    "baseline": ([], 1.62, 1.48, (410, 410, 820, 2350)),
    "mixed_precision": (["mixed_precision:dtype=bf16"], 0.98, 0.81, (410, 410, 820, 1310)),
    "flash_attention": (["flash_attention"], 1.41, 1.33, (410, 410, 820, 1480)),
    "recompute": (["recompute:granularity=full"], 2.07, 1.94, (410, 410, 820, 390)),
    "zero2 (2 processes)": (["zero:stage=2,degree=2"], 1.60, 1.21, (410, 205, 410, 2350)),
    "lora": (["lora:rank=16"], 1.13, 1.09, (418, 8, 16, 2210)),
    "int8+lora": (["rtn:bits=8", "lora:rank=16"], 1.34, 1.12, (113, 8, 16, 2230)),
    "all": (["mixed_precision", "flash_attention", "recompute", "lora"], 0.91, 0.74, (418, 8, 16, 330)),
}
PARTS = (
    # phase, module, operator, kind, share, FLOP per byte
    ("forward", "attention", "qkv", "gemm", 0.07, 90.0), ("forward", "attention", "scores", "attention", 0.05, 24.0),
    ("forward", "attention", "softmax", "softmax", 0.03, 0.6), ("forward", "mlp", "gate_up", "gemm", 0.12, 120.0),
    ("forward", "mlp", "down", "gemm", 0.06, 110.0), ("forward", "norm", "rms_norm", "norm", 0.02, 0.8),
    ("forward", "head", "loss", "loss", 0.03, 1.5), ("backward", "attention", "qkv", "gemm", 0.13, 85.0),
    ("backward", "attention", "scores", "attention", 0.1, 20.0), ("backward", "mlp", "gate_up", "gemm", 0.2, 115.0),
    ("backward", "mlp", "down", "gemm", 0.1, 108.0), ("backward", "norm", "rms_norm", "norm", 0.02, 0.7),
    ("optimizer", "all", "adamw", "optimizer", 0.05, 0.5),
)  # fmt: skip


def result(name: str, step: float, memory: tuple[int, ...], source: str, seed: int, plan: list[str]) -> Result:
    rng = np.random.default_rng(seed)
    r = Result(
        source=source, experiment_id=f"{seed % 100:012x}", name=name, environment=dict(ENVIRONMENT),
        experiment={"model": {"name": "llama-110m"}, "plan": plan, "cluster": "local",
                    "workload": {"kind": "pretrain", "seq_len": 512, "batch_size": 8, "steps": 20}},
        created="2026-01-05T10:00:00+00:00", command="ridgeline ablate study.toml",
    )  # fmt: skip
    used = 0.0
    for phase, module, operator, kind, share, intensity in PARTS:
        seconds = step * share * float(rng.uniform(0.9, 1.1)) * 0.93
        used += seconds
        top = min(9.2e11, 8.1e10 * intensity) * float(rng.uniform(0.45, 0.95))
        r.breakdown.append(
            Row(phase=phase, module=module, operator=operator, kind=kind, seconds=seconds, count=12,
                flops=top * seconds, bytes=top * seconds / intensity, roof=top / min(9.2e11, 8.1e10 * intensity))
        )  # fmt: skip
    if "zero" in name:
        r.breakdown.append(Row(phase="communication", module="all", operator="reduce_scatter", kind="collective",
                               seconds=0.05 * step, link_bytes=2e8, exposed_seconds=0.02 * step))  # fmt: skip
    names = ("parameters", "gradients", "optimizer", "activations")
    r.memory = [Memory(category=c, bytes=m * MIB * float(rng.uniform(0.97, 1.06))) for c, m in zip(names, memory)]  # noqa: B905
    r.memory.append(Memory(category="temporaries", bytes=float(rng.uniform(90, 180)) * MIB))
    if source == "predicted":
        r.metrics["step_time_s"] = Metric(value=step, unit="s", better="lower", source="measured profile")
        r.metrics["tokens_per_s"] = Metric(value=TOKENS / step, unit="tokens/s", better="higher", source="profile")
    else:
        _measure(r, step, rng)
    r.metrics["mfu"] = Metric(value=0.38 / step, better="higher", source="dense fp32 peak 0.92 TFLOP/s")
    r.metrics["peak_bytes"] = Metric(value=r.peak_bytes or 0, unit="bytes", better="lower", source="meter")
    return r


def _measure(r: Result, step: float, rng: np.random.Generator) -> None:
    for repeat in range(3):
        level = step * (1 + 0.008 * float(rng.normal()))
        for i in range(20):
            r.samples.append(
                Sample(step=i, seconds=level * (1.9 if i == 0 else 1 + 0.012 * float(rng.normal())), tokens=TOKENS,
                       loss=9.1 - 2.4 * (1 - np.exp(-i / 9)) + 0.01 * float(rng.normal()), warmup=i == 0, repeat=repeat)
            )  # fmt: skip
    ci = bootstrap_ci(step_blocks(r.samples), n=500)
    n = 57
    r.metrics["step_time_s"] = Metric(value=ci.value, unit="s", low=ci.low, high=ci.high, n=n, better="lower",
                                      source="measured")  # fmt: skip
    r.metrics["tokens_per_s"] = Metric(value=TOKENS / ci.value, unit="tokens/s", low=TOKENS / ci.high,
                                       high=TOKENS / ci.low, n=n, better="higher", source="measured")  # fmt: skip
    r.metrics["final_loss"] = Metric(value=r.samples[-1].loss or 0, unit="nats/token", better="lower", n=3)
    r.checks.append(Check(name="step times add up to wall time", passed=True, expected=31.2, got=31.1, tolerance=0.02))
    r.notes.append("3 of 60 steps were warm-up (detected, first step always) and are left out")


def ablation(failing: bool = True) -> Ablation:
    outcomes: list[Outcome] = []
    for i, (name, (plan, measured, predicted, memory)) in enumerate(PLANS.items()):
        o = Outcome(name=name, plan=plan,
                    predicted=result(name, predicted, memory, "predicted", 100 + i, plan),
                    measured=result(name, measured, memory, "measured", i, plan))  # fmt: skip
        assert o.measured is not None
        base = outcomes[0].measured if outcomes else o.measured
        assert base is not None
        ratio = ratio_ci(step_blocks(base.samples), step_blocks(o.measured.samples), n=500)
        o.speedup = Metric(value=ratio.value, low=ratio.low, high=ratio.high, better="higher")
        o.predicted_speedup = PLANS["baseline"][2] / predicted
        o.memory_ratio = (o.measured.peak_bytes or 0) / (base.peak_bytes or 1)
        o.verdict = "baseline" if name == "baseline" else verdict(ratio.low, ratio.high)
        if name != "baseline":
            o.checks = [Check(name="same loss as baseline", passed=name != "int8+lora", expected=6.98, got=6.99,
                              tolerance=0.01)]  # fmt: skip
        outcomes.append(o)
    if failing:
        outcomes[-2] = _failed(outcomes[-2])
    return Ablation(
        id="5f3a9c01d2", name="llama-110m on one CPU", baseline="baseline", outcomes=outcomes, environment=ENVIRONMENT,
        created="2026-01-05T10:31:00+00:00", command="ridgeline ablate study.toml",
        notes=["the machine's load average was 1.7 at the start: timings may be disturbed"],
    )  # fmt: skip


def _failed(o: Outcome) -> Outcome:
    assert o.measured is not None
    dead = Result(
        source="measured",
        experiment_id="dead",
        name=o.name,
        experiment=o.measured.experiment,
        status="oom",
        reason="rank 0 was killed (signal 9): most likely out of memory",
        environment=ENVIRONMENT,
    )
    return o.model_copy(update={"measured": dead, "speedup": None, "memory_ratio": None, "verdict": "failed",
                                "checks": []})  # fmt: skip
