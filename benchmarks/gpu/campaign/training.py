"""Training on one device: MFU, what each technique gains or costs, and other engines where they are installed."""

from __future__ import annotations

import gc
import importlib.util
import statistics
from collections.abc import Callable
from functools import partial

from campaign.cells import Cell, Figures, NotInstalled, Setting
from ridgeline.experiments import make
from ridgeline.measure.ablate import measure_plan
from ridgeline.measure.backends import require
from ridgeline.measure.merge import merge
from ridgeline.predict import predict
from ridgeline.predict.operators.kernel import peak_flops
from ridgeline.predict.predict import training_flops
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result

BASE = ("mixed_precision", "flash_attention", "fused_layers")
COMPILED = (*BASE[:2], "fused_layers:projections=false,elementwise=false", "torch_compile")
"""The loss in chunks, and everything else left to the compiler."""
PLANS = {
    "bf16": BASE,
    "bf16, compile": COMPILED,
    "fp8 by rows": (*BASE, "fp8:scaling=rowwise"),
    "fp8": (*BASE, "fp8"),
    "unfused": BASE[:2],
    "recompute": (*BASE, "recompute"),
    "8-bit optimizer": (*BASE, "adamw8bit"),
    "16-bit weights": ("mixed_precision:weights=low", *BASE[1:]),
    "static memory": (*BASE, "static_memory"),
    "lomo": (*BASE, "lomo"),
    "activations on the host": (*BASE, "activation_offload"),
    "optimizer on the host": (*BASE, "zero_offload"),
    "unfused attention": (BASE[0], BASE[2]),
    "fp32": BASE[1:],
}
LARGER = {"bf16": (2, BASE), "fp8": (2, (*BASE, "fp8")),
          "bf16, recompute": (4, (*BASE, "recompute")), "fp8, recompute": (4, (*BASE, "recompute", "fp8")),
          "fp8 by rows, recompute": (4, (*BASE, "recompute", "fp8:scaling=rowwise")),
          "bf16, recompute, compile": (4, (*COMPILED, "recompute"))}  # fmt: skip
"""Rows of a batch and the plan."""
METRICS = ("step_time_s", "tokens_per_s", "mfu", "peak_bytes", "device_used_bytes")
SECONDS = 170.0
WARM = 3
"""Steps that are not counted: they compile kernels and fill caches."""
MEASURED = 4.0
"""Seconds of steps that are enough."""


def cells(setting: Setting) -> list[Cell]:
    """One model with every plan, a larger one with those that fit, and other engines."""
    if setting.small:
        work = {"kind": "pretrain", "seq_len": 64, "batch_size": 2, "steps": 3}
        return [_cell(setting, "llama-tiny", work, n, p) for n, p in (("fp32", ()), ("fp32, fused", BASE[1:]))]
    work = {"kind": "pretrain", "seq_len": 4096, "batch_size": 4, "steps": 24}
    found = [_cell(setting, "llama3.2-1b", work, n, p) for n, p in PLANS.items()]
    found += [_cell(setting, "llama3.2-3b", {**work, "batch_size": b}, n, p) for n, (b, p) in LARGER.items()]
    found.append(_cell(setting, "llama3.2-1b", work, "bf16, Hugging Face Trainer", BASE[:2], backend="hf"))
    return found


def _cell(
    setting: Setting, model: str, work: dict[str, object], name: str, plan: tuple[str, ...], backend: str = "native"
) -> Cell:
    def experiment() -> Experiment:
        return make(model, Cluster(device=setting.device), work, list(plan))

    goals = {"mfu": (">=", 0.5)} if name.startswith("bf16") and backend == "native" and not setting.small else {}
    return Cell(f"{model}, {name}", partial(measured, experiment, backend), partial(predicted, experiment), goals,
                SECONDS)  # fmt: skip


def figures(result: Result) -> Figures:
    """The metrics that lines show."""
    return {k: result.metrics[k].value for k in METRICS if k in result.metrics}


def predicted(experiment: Callable[[], Experiment]) -> Figures:
    """What the predictor says; a run that does not fit is a prediction too."""
    said = predict(experiment())
    return figures(said) | ({} if said.status == "ok" else {"status": said.status})


def measured(experiment: Callable[[], Experiment], backend: str) -> Figures:
    """Median step and what it uses. Raises :class:`RuntimeError` with the reason of a run that fails."""
    e = experiment()
    flops, _, dtype = training_flops(e)
    peak = flops / peak_flops(e.cluster.device, dtype)
    if backend == "native":
        found = stepped(e)
        return found | {"mfu": peak / found["step_time_s"]}
    if backend == "hf" and not (importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate")):
        raise NotInstalled("transformers or accelerate is not installed")
    require(backend, e)
    result = merge([measure_plan(e, memory=False, timeout=SECONDS - 10, backend=backend)])
    if result.status != "ok":
        raise RuntimeError(f"{result.status}: {result.reason} {' '.join(result.notes)[-500:]}")
    found = figures(result)
    found["mfu"] = peak / found["step_time_s"]
    steps = sorted(s.seconds for s in result.samples if not s.warmup)
    spread = {"quartiles_s": [steps[len(steps) // 4], steps[3 * len(steps) // 4]]} if steps else {}
    last = [s.loss for s in result.samples if s.loss is not None][-1:]
    return found | spread | ({"last_loss": last[0]} if last else {})


def stepped(e: Experiment) -> Figures:
    """Median step here, of as many as are worth :data:`MEASURED` seconds."""
    import torch

    from ridgeline.jobs.worker import setup
    from ridgeline.train.trainer import StepStats, Trainer

    device = setup(1)
    gc.collect()  # what a line before this one held
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(e, device)
    taken: list[float] = []
    losses: list[float] = []

    def watch(stats: StepStats) -> bool:
        taken.append(stats.seconds)
        losses.append(stats.loss)
        return len(taken) >= WARM + 3 and sum(taken[WARM:]) >= MEASURED

    trainer.drive(watch)
    steps = sorted(taken[min(WARM, len(taken) - 1) :])
    second = statistics.median(steps)
    found: Figures = {
        "step_time_s": second, "tokens_per_s": e.batch_size * e.training.seq_len / second,
        "quartiles_s": [steps[len(steps) // 4], steps[3 * len(steps) // 4]], "last_loss": losses[-1],
    }  # fmt: skip
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found
