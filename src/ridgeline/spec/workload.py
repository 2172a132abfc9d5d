"""Workload: what is to be done with the model — pre-train, fine-tune, generate a fixed batch, or serve arrivals."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Workload(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Storage dtype of the weights; auto: fp32 in training and on CPUs, else bf16."""


class Training(_Workload):
    """Fields shared by pre-training and fine-tuning."""

    seq_len: int = Field(default=2048, ge=2)
    """Tokens per sequence."""
    batch_size: int | None = Field(default=None, ge=1)
    """Sequences per optimizer step over all ranks; None: one per data-parallel rank."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Sequences per rank in one forward pass; None: no gradient accumulation."""
    steps: int = Field(default=20, ge=1)
    lr: float = Field(default=3e-4, ge=0)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate of the cosine schedule, as a share of ``lr``."""
    warmup_steps: int = Field(default=2, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0: no clipping."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    seed: int = 0
    data: str = "stdlib"
    """``stdlib`` (the running Python's own sources and documentation), a file, a directory, or ``hf:NAME``."""
    checkpoint: str | None = None
    """Hugging Face checkpoint directory to start from; None: random weights from ``seed``."""
    tokenizer: str | None = None
    """``tokenizer.json`` or a checkpoint directory; None: a byte-level BPE is trained on the data."""


class Pretrain(Training):
    """All parameters train on packed text."""

    kind: Literal["pretrain"] = "pretrain"


class FineTune(Training):
    """Continue training from a checkpoint, usually with adapters."""

    kind: Literal["finetune"] = "finetune"


class Generate(_Workload):
    """A fixed batch: one prefill of ``prompt_len`` tokens, then ``output_len`` tokens decoded greedily."""

    kind: Literal["generate"] = "generate"
    batch_size: int = Field(default=1, ge=1)
    prompt_len: int = Field(default=512, ge=1)
    output_len: int = Field(default=128, ge=1)
    seed: int = 0
    checkpoint: str | None = None


class Serve(_Workload):
    """Requests arriving over time (predicted and measured by the serving engine)."""

    kind: Literal["serve"] = "serve"
    rate: float = Field(default=1.0, gt=0)
    """Mean arrivals per second."""
    arrival: str = "poisson"
    prompt_len: int = Field(default=512, ge=1)
    output_len: int = Field(default=128, ge=1)
    requests: int = Field(default=100, ge=1)
    seed: int = 0
    checkpoint: str | None = None


Workload = Annotated[Pretrain | FineTune | Generate | Serve, Field(discriminator="kind")]
WORKLOADS: dict[str, type[_Workload]] = {
    "pretrain": Pretrain, "finetune": FineTune, "generate": Generate, "serve": Serve,
}  # fmt: skip
TRAINING_TASKS = frozenset({"pretrain", "finetune"})
