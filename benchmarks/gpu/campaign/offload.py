"""Models larger than the memory that they may use: training and serving under a cap, beside the prediction for it."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

from campaign.cells import Cell, Figures, Setting
from ridgeline.experiments import make
from ridgeline.predict import predict
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import default_plan

GB = 1e9
BASE = ("mixed_precision", "flash_attention", "fused_layers")
LIMIT = 240.0


def cells(setting: Setting) -> list[Cell]:
    """A cap in GB, the model, and the plan that makes it fit."""
    if setting.small:
        return [_train(setting, "llama-tiny", 4.0, ("zero_offload",), 64, 2)]
    return [
        _train(setting, "llama3.2-1b", 16.0, (*BASE, "zero_offload", "recompute"), 2048, 4),
        _train(setting, "llama3.2-3b", 30.0, (*BASE, "zero_offload", "recompute"), 2048, 4),
        _train(setting, "llama3.2-3b", 16.0, (*BASE, "zero_infinity", "recompute"), 2048, 4),
        _train(setting, "llama3.2-1b", 24.0, (*BASE, "activation_offload"), 4096, 4),
        _serve(setting, "llama3.1-8b", 10.0, ("zero_inference",), 16),
        _serve(setting, "qwen3-30b-a3b", 24.0, ("moe_offload",), 4),
    ]


def _given(setting: Setting, model: str, cap: float, plan: tuple[str, ...], work: dict[str, object]) -> Experiment:
    device = setting.device.model_copy(update={"memory_bytes": cap * GB})
    return make(model, Cluster(device=device), work, list(plan))


def _train(setting: Setting, model: str, cap: float, plan: tuple[str, ...], length: int, batch: int) -> Cell:
    work: dict[str, object] = {"kind": "pretrain", "seq_len": length, "batch_size": batch, "steps": 6}
    given = partial(_given, setting, model, cap, plan, work)
    name = f"training of {model} in {cap:g} GB, {', '.join(p for p in plan if p not in BASE)}"
    goals = {"peak_bytes": ("<=", cap * GB)} if setting.kind == "cuda" else {}
    return Cell(name, partial(train, setting, given, cap), partial(train_said, given), goals, LIMIT)


def train_said(given: partial[Experiment]) -> Figures:
    said = predict(given())
    found: Figures = {k: said.metrics[k].value for k in ("step_time_s", "peak_bytes") if k in said.metrics}
    return found if said.status == "ok" else found | {"status": said.status}


def _cap(setting: Setting, cap: float) -> None:
    """Let this process use no more of the device than ``cap`` GB."""
    import torch

    if setting.kind == "cuda":
        torch.cuda.set_per_process_memory_fraction(cap * GB / torch.cuda.get_device_properties(0).total_memory)


def train(setting: Setting, given: partial[Experiment], cap: float) -> Figures:
    """Median step under the cap."""
    import torch

    from campaign.engine import clock
    from ridgeline.jobs.worker import setup
    from ridgeline.train.trainer import Trainer

    device = setup(1)
    _cap(setting, cap)
    trainer = Trainer(given(), device)
    taken = []
    for _ in range(6):
        start = clock()
        trainer.step()
        taken.append(clock() - start)
    found: Figures = {"step_time_s": statistics.median(taken[2:])}
    return found | ({"peak_bytes": torch.cuda.max_memory_allocated()} if setting.kind == "cuda" else {})


def _serve(setting: Setting, model: str, cap: float, plan: tuple[str, ...], batch: int) -> Cell:
    work: dict[str, object] = {
        "kind": "serve", "prompt_len": 128, "output_len": 8, "concurrency": batch, "requests": batch, "dtype": "bf16",
        "max_num_seqs": batch, "max_model_len": 256, "kv_cache_bytes": 2 << 30, "engine": "ridgeline",
    }  # fmt: skip
    given = partial(_given, setting, model, cap, (*default_plan("serve"), *plan), work)
    return Cell(f"serving of {model} in {cap:g} GB, {', '.join(plan)}, batch {batch}",
                partial(serve, setting, given, cap), partial(serve_said, given), {}, LIMIT)  # fmt: skip


def serve_said(given: partial[Experiment]) -> Figures:
    said = predict(given())
    return {"step_s": said.metrics["itl_p50_s"].value} if said.status == "ok" else {"status": said.status}


def serve(setting: Setting, given: partial[Experiment], cap: float) -> Figures:
    """Median decode step under the cap."""
    from campaign.engine import steps
    from ridgeline.jobs.worker import setup
    from ridgeline.serve.build_engine import make_engine

    e, device = given(), setup(1)
    w: Any = e.workload
    _cap(setting, cap)
    start = time.perf_counter()
    engine = make_engine(e, device)
    ready = time.perf_counter() - start
    _, taken, _ = steps(engine, [w.prompt_len] * w.concurrency, w.output_len)
    return {"step_s": statistics.median(taken), "start_s": ready}
