"""Workload: the task for the model — pre-train, fine-tune, generate a fixed batch, or serve arrivals."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from ridgeline.spec.backends import checked


class _Workload(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Storage dtype of the weights; auto: fp32 in training and on CPUs, else bf16."""
    kernels: dict[str, str] = Field(default_factory=dict)
    """Back ends that are to compute operators on a GPU, by operator (:data:`ridgeline.spec.backends.BACKENDS`); of the
    others, the fastest that `ridgeline probe` measured."""

    _newer: ClassVar[tuple[str, ...]] = ("kernels",)

    @field_validator("kernels", mode="before")
    @classmethod
    def _known(cls, asked: Any) -> Any:
        return checked(asked) if isinstance(asked, dict) else asked

    @model_serializer(mode="wrap")
    def _as_before(self, made: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without its newer fields where they are empty: the identity of an experiment is what it was before."""
        fields: dict[str, Any] = made(self)
        for name in self._newer:
            if not fields.get(name):
                fields.pop(name, None)
        return fields


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
    seed: int = Field(default=0, ge=0)
    data: str = "stdlib"
    """``stdlib`` (the running Python's own sources and documentation), a file, a directory, or ``hf:NAME``."""
    checkpoint: str | None = None
    """Hugging Face checkpoint directory to start from; None: random weights from ``seed``."""
    tokenizer: str | None = None
    """``tokenizer.json`` or a checkpoint directory; None: the checkpoint's own; without a checkpoint, a byte-level BPE
    trained on the data."""
    document_mask: bool = False
    """Whether documents in the same window are masked from each other."""
    eval_batches: int = Field(default=1, ge=1)
    """Batches held out for evaluation, if there is enough data."""

    @property
    def separates_documents(self) -> bool:
        """Whether attention is masked by document."""
        return self.document_mask

    @property
    def instructions(self) -> bool:
        """Whether the data are examples of prompts and answers rather than running text."""
        return False


class Pretrain(Training):
    """All parameters train on packed text."""

    kind: Literal["pretrain"] = "pretrain"


class FineTune(Training):
    """Continue training from a checkpoint, usually with adapters, on text or on instruction data (a ``.jsonl`` or
    ``.json`` file of chat messages, Alpaca records, prompt and completion, or text)."""

    kind: Literal["finetune"] = "finetune"
    packing: bool = True
    """Whether examples share a row; each attends only to itself. False: one example per row, padded."""
    train_on_prompt: bool = False
    """Whether the loss includes prompts."""
    template: str | None = None
    """Chat template: a Jinja file, or chatml, llama2, alpaca; None: the checkpoint's own."""
    skip_bad: bool = False
    """Leave out records that cannot be read, and count them, instead of stopping at the first."""

    @property
    def instructions(self) -> bool:
        """Whether the data are a file of examples."""
        return self.data.lower().endswith((".jsonl", ".json"))

    @property
    def separates_documents(self) -> bool:
        """Packed examples never attend to each other."""
        return self.document_mask or (self.instructions and self.packing)


class Generate(_Workload):
    """A fixed batch: one prefill of ``prompt_len`` tokens, then ``output_len`` tokens decoded greedily."""

    kind: Literal["generate"] = "generate"
    batch_size: int = Field(default=1, ge=1)
    prompt_len: int = Field(default=512, ge=1)
    output_len: int = Field(default=128, ge=1)
    engine: str = ""
    """Serving software whose host time is included (vllm, vllm-2023, trtllm); empty: the plain torch twin."""
    seed: int = Field(default=0, ge=0)
    checkpoint: str | None = None


class Compress(Generate):
    """Make a trained checkpoint smaller, layer by layer, with calibration text; then evaluate the result: its held-out
    perplexity, its bytes, and its speed on the fixed batch that :class:`Generate` describes."""

    kind: Literal["compress"] = "compress"  # type: ignore[assignment]
    batch_size: int = Field(default=1, ge=1)
    prompt_len: int = Field(default=64, ge=1)
    output_len: int = Field(default=32, ge=1)
    data: str = "stdlib"
    """Calibration text, as in training, or ``self``: text generated by the model. Without ``eval_data``, perplexity is
    evaluated on the text's held-out end."""
    samples: int = Field(default=128, ge=1)
    """Calibration windows, drawn by ``seed``."""
    seq_len: int = Field(default=2048, ge=2)
    """Tokens of one window, in calibration and in evaluation."""
    eval_data: str | None = None
    """Other text to evaluate perplexity on."""
    eval_windows: int = Field(default=128, ge=2)
    """Largest number of held-out windows."""
    tokenizer: str | None = None
    """``tokenizer.json`` or a checkpoint directory; None: the checkpoint's own."""


class Serve(_Workload):
    """Requests to a serving engine: at a rate, in a closed loop of fixed concurrency, or from a trace."""

    kind: Literal["serve"] = "serve"
    rate: float | None = Field(default=None, gt=0)
    """Mean arrivals per second; None: 1, or as the trace or the closed loop has it."""
    burstiness: float = Field(default=1.0, gt=0)
    """Shape of the gamma-distributed gaps between arrivals: 1 is a Poisson process, less is burstier."""
    concurrency: int | None = Field(default=None, ge=1)
    """Closed loop: this many clients, each of which sends its next request when the last one is answered."""
    trace: str | None = None
    """File of recorded arrivals and lengths (Azure CSV or Mooncake JSON lines, also gzipped)."""
    prompt_len: int = Field(default=512, ge=1)
    """Mean prompt tokens."""
    output_len: int = Field(default=128, ge=1)
    """Mean generated tokens."""
    length_cv: float = Field(default=0.0, ge=0, le=4)
    """Coefficient of variation of both lengths; 0: all equal."""
    output_cv: float | None = Field(default=None, ge=0, le=4)
    """That of the generated tokens alone; None: ``length_cv``."""
    length_shape: Literal["gamma", "lognormal", "uniform"] = "gamma"
    """Distribution that lengths are drawn from."""
    requests: int | None = Field(default=None, ge=1)
    """How many; None: 1000, or the whole trace."""
    shared_prefix: int = Field(default=0, ge=0)
    """Tokens at the beginning of every prompt that are the same in all; the rest of a prompt is its own."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Maximum number of sequences in one iteration; None: the engine's default."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in one iteration; None: the engine's default."""
    slo_ttft: float | None = Field(default=None, gt=0)
    """Limit on the time to first token, in seconds, for goodput."""
    slo_tpot: float | None = Field(default=None, gt=0)
    """Limit on the mean time per further token, in seconds, for goodput."""
    engine: str = ""
    """Serving software that is predicted: ridgeline, vllm, vllm-2023, sglang, trtllm, ...; empty: ridgeline on this
    machine (``local``), elsewhere the plan's own schedule."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt and output together; None: as long as the model's positions."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Memory of Ridgeline's key/value pool; None: what the engine finds."""
    kv_cache_share: float | None = Field(default=None, gt=0, le=1)
    """Largest fraction of the device's free memory for the pool; None: nine tenths on a GPU; in a
    computer's memory a quarter, as others may need the rest."""
    seed: int = Field(default=0, ge=0)
    checkpoint: str | None = None

    _newer: ClassVar[tuple[str, ...]] = ("kernels", "shared_prefix")

    @property
    def offered(self) -> float | None:
        """Requests that arrive per second, whatever the engine does; None: as the trace or the closed loop has it."""
        return self.rate or (None if self.trace or self.concurrency else 1.0)

    @property
    def open_load(self) -> bool:
        """Whether neither a rate, nor clients, nor a trace is given."""
        return self.rate is None and self.concurrency is None and self.trace is None

    def sample(self) -> Serve:
        """The first 256 requests of the load, as many as engines take into an iteration: what compares plans."""
        return self.model_copy(update={"requests": min(self.requests or 256, 256)})

    @model_validator(mode="after")
    def _one_source(self) -> Serve:
        if self.concurrency is not None and (self.rate is not None or self.trace is not None):
            raise ValueError("concurrency closes the loop: give no rate and no trace with it")
        if self.trace is None and self.shared_prefix >= self.prompt_len:
            raise ValueError(f"the {self.shared_prefix} tokens of shared_prefix are the beginning of every prompt, and"
                             f" prompt_len is {self.prompt_len}: raise prompt_len above shared_prefix")  # fmt: skip
        if self.length_shape == "uniform" and max(self.length_cv, self.output_cv or 0.0) > 3**-0.5:
            raise ValueError("a uniform distribution of lengths varies by 0.577 at most: lower length_cv and output_cv")
        return self


Workload = Annotated[Pretrain | FineTune | Generate | Compress | Serve, Field(discriminator="kind")]
WORKLOADS: dict[str, type[_Workload]] = {
    "pretrain": Pretrain, "finetune": FineTune, "generate": Generate, "compress": Compress,
    "serve": Serve,
}  # fmt: skip
TRAINING_TASKS = frozenset({"pretrain", "finetune"})
