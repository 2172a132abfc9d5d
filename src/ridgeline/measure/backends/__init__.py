"""Other engines for the same Experiment, so that a comparison is fair: same model, weights, batches and schedule.

Each backend declares the techniques that it supports; the rest are refused with the reason. Results share one schema
and name the engine in ``environment["backend"]``. No torch here until an engine is created.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ridgeline.measure.backends.backend import BackendSpec, TrainingEngine, always, only
from ridgeline.spec.errors import Incompatible, UserError, unknown
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.adapters.lora import LoRA
from ridgeline.techniques.kernels.flash_attention import FlashAttention
from ridgeline.techniques.memory.recompute import Recompute
from ridgeline.techniques.memory.zero_offload import ZeroOffload
from ridgeline.techniques.parallel.data_parallel import DataParallel
from ridgeline.techniques.parallel.zero import Zero
from ridgeline.techniques.precision.mixed_precision import MixedPrecision
from ridgeline.techniques.registry import techniques_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ridgeline.jobs.job import TrainOptions
    from ridgeline.techniques.technique import Technique

__all__ = ["BACKENDS", "NATIVE", "TrainingEngine", "engine_versions", "make_engine", "require"]

NATIVE = "native"
OF_THE_MODEL: tuple[type[Technique], ...] = (FlashAttention, Recompute, LoRA)
"""Techniques that act on the model, which DeepSpeed takes as it is; the others are options of its engine."""


def _precision(weights: str, otherwise: str) -> Callable[[Technique, Experiment], str]:
    """mixed_precision with these ``weights`` only; ``otherwise``: the reason and the fix."""

    def reason_for(t: Technique, e: Experiment) -> str:
        if t.weights != weights:  # type: ignore[attr-defined]
            return otherwise
        if t.dtype == "fp16" and e.cluster.device.kind == "cpu":  # type: ignore[attr-defined]
            return "fp16 needs a GPU there; use dtype=bf16"
        return ""

    return reason_for


def _hf_model(e: Experiment) -> str:
    if not e.model.causal or e.model.is_encoder_decoder:
        return f"it is driven for causal decoders, and {e.model.name} is none; use a decoder, or --backend native"
    if e.parallel:
        return "it is driven with data parallelism only; drop the model-parallel techniques"
    return ""


def _peft(t: Technique, e: Experiment) -> str:
    if find_spec("peft") is None:
        return "its LoRA is the peft library, which is not installed; pip install 'ridgeline[finetune]'"
    if e.world > 1:
        return "peft is driven in one process; drop data_parallel, or use --backend native"
    return ""


def _deepspeed_model(e: Experiment) -> str:
    if e.parallel:
        return "it is driven with data parallelism and ZeRO only; drop the model-parallel techniques"
    if e.dtype != "fp32":
        return f'its weights are fp32 or under mixed_precision, not {e.dtype}; set workload dtype = "fp32"'
    return ""


BACKENDS = {
    b.name: b
    for b in (
        BackendSpec(NATIVE, "Ridgeline", "ridgeline.train.trainer:Trainer"),
        BackendSpec(
            "hf", "Hugging Face Trainer", "ridgeline.measure.backends.hf:HuggingFace",
            ("transformers", "accelerate"), "hf",
            expresses={
                DataParallel: always,
                FlashAttention: always,
                LoRA: _peft,
                MixedPrecision: _precision("fp32", "the Trainer keeps fp32 weights under autocast; use weights=fp32,"
                                              " or --backend deepspeed"),
                Recompute: only("the Trainer checkpoints every block whole; use policy=full with every=1",
                                  policy=("full",), every=(1,)),
            },
            model=_hf_model,
        ),
        BackendSpec(
            "deepspeed", "DeepSpeed", "ridgeline.measure.backends.deepspeed_engine:DeepSpeed",
            ("deepspeed",), "deepspeed",
            expresses={
                DataParallel: always,
                Zero: only("DeepSpeed shards over all data-parallel ranks and prefetches by itself; use only stage",
                             degree=(None,), reshard=(None,), prefetch=(1,)),
                ZeroOffload: only("it is driven with an update in step; drop delayed", delayed=(False,)),
                MixedPrecision: _precision("low", "DeepSpeed keeps low-precision weights beside fp32 masters; use"
                                              " weights=low, or --backend hf"),
                # These act on the model, which DeepSpeed uses as is.
                **dict.fromkeys(OF_THE_MODEL, always),
            },
            model=_deepspeed_model,
        ),
        BackendSpec("megatron-core", "Megatron-Core", refused=(
            "its layers need CUDA (GPTModel and its random-number tracker assert it; tried: 0.16 on CPU), so a "
            "comparison could not be tested here; use --backend deepspeed or native, or `ridgeline predict` with "
            "--with megatron_ptdp")),
        BackendSpec("torchtitan", "TorchTitan", refused=(
            "its wheel imports Triton without declaring it and its training needs CUDA (tried: 0.3), so a comparison "
            "could not be tested here; the native engine stands on the same PyTorch parts: use --backend native")),
    )
}  # fmt: skip


SERVED: dict[type[Technique], Callable[[Technique, Experiment], str]] = {FlashAttention: always}
"""Supported techniques of the serving baseline: static batches, and the library's attention."""


def require(name: str, e: Experiment, options: TrainOptions | None = None) -> None:
    """Raise :class:`UserError` unless the backend is known, can express the experiment and is installed.

    ``options``: those of a training job; a foreign engine keeps no checkpoints of ours and has no memory budget.
    """
    if name not in BACKENDS:
        raise unknown("backend", name, BACKENDS, "--backend")
    backend = BACKENDS[name]
    if backend.refused:
        why, _, fix = backend.refused.partition("; ")
        raise Incompatible(f"backend {name}: {why}", fix)
    if name == NATIVE:
        return
    if not e.is_training and (name, e.task) != ("hf", "serve"):
        raise Incompatible(f"backend {name} trains, and this is task {e.task!r}", "drop --backend")
    _refuse(name, "", backend.model(e))
    expresses = backend.expresses if e.is_training else SERVED
    for t in techniques_of(e.plan):
        reason_for = expresses.get(type(t))
        if reason_for is None:
            known = ", ".join(kind.card.name for kind in expresses)
            raise Incompatible(
                f"backend {name} has no {t.card.name}",
                f"drop it, or use --backend native; {name} has: {known}",
            )
        _refuse(name, t.card.name, reason_for(t, e))
    if options and options.save_every:
        raise Incompatible(f"backend {name} keeps no checkpoints of this run", "drop --save-every (--out exports)")
    if options and options.device_memory:
        raise Incompatible(f"backend {name} has no device memory budget", "drop --device-memory")
    missing = [p for p in backend.packages if find_spec(p) is None]
    if missing:
        raise UserError(
            f"backend {name} needs {' and '.join(missing)}, not installed", f"pip install 'ridgeline[{backend.extra}]'"
        )


def _refuse(backend: str, technique: str, reason: str) -> None:
    if reason:
        why, _, fix = reason.partition("; ")
        raise Incompatible(f"backend {backend}: {technique + ': ' if technique else ''}{why}", fix)


def make_engine(name: str, e: Experiment, device: torch.device, rank: int, world: int) -> TrainingEngine:
    """One rank of the backend's engine, ready to train."""
    module, _, attribute = BACKENDS[name].engine.partition(":")
    engine: TrainingEngine = getattr(importlib.import_module(module), attribute)(e, device, rank, world)
    return engine


def engine_versions(name: str) -> dict[str, str]:
    """For a result's environment: the backend and the versions of its packages."""
    found = {"backend": name}
    for package in (*BACKENDS[name].packages, *(["peft"] if name == "hf" else [])):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
