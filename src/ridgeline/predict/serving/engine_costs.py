"""Inference engines: what the serving software adds to the operators, as a few named constants, and its default
scheduling: techniques of the plan extend it (:meth:`Technique.scheduling`), and for Ridgeline's own engine they define
it.

Host time follows one rule: host work that overlaps with the GPU counts only where it takes longer, host work while the
GPU is idle is added. An iteration replayed as a CUDA graph costs the GPU's time, an eager one the larger of it and the
dispatch of its operators. Scheduling, sampling and detokenization are added, unless the engine overlaps them with the
current iteration. Seconds are for a host of 2020 (Zen 2, as in a DGX A100); ``HOST_SPEED`` scales them for others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.graph.graph import NARROW
from ridgeline.spec.device import Device
from ridgeline.spec.errors import unknown
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.scheduling import OWN, Limits, Scheduling, engine_name
from ridgeline.techniques.technique import Technique

FEW_ROWS = 8
"""Maximum number of rows for which a product is bound by reading the weights, and engines have special kernels."""


@dataclass(frozen=True)
class EngineCosts:
    """Constants of one serving engine and version."""

    name: str
    title: str
    graphs: bool
    """Whether decode iterations are replayed as CUDA graphs; Ridgeline's own engine has some of those with prompts, too
    (:func:`ridgeline.spec.scheduling.captured_tokens`)."""
    dispatch_s: float
    """Host seconds to issue one operator of an eager iteration."""
    iteration_s: float
    """Seconds between iterations that nothing overlaps."""
    schedule_s: float
    """Seconds to compose an iteration and return its tokens: hidden behind the GPU where the engine overlaps them."""
    sequence_s: float
    """The same per running sequence."""
    layer_s: float
    """Additional seconds per layer in an iteration with prompts: attention is outside the graphs, so every layer is
    launched and synchronized separately."""
    prefill_share: float
    """Rate of a prompt's kernels inside a model, relative to the same kernels timed alone in a loop: real data and
    alternating kinds of kernels lead to lower clocks and colder caches."""
    request_s: float
    """Seconds that a request spends outside iterations (HTTP, tokenizer, queues), all included in its time to first
    token."""
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked: bool
    """Whether a prompt may be split over several iterations."""
    continuous: bool = True
    """Whether requests can join a running batch."""
    padded: bool = False
    """Whether every sequence of an iteration is padded to the longest."""
    mixes: bool = True
    """Whether prompts and decode steps share an iteration (otherwise prompts go first, and decoding waits)."""
    reserves: bool = False
    """Whether a request is admitted only when its whole output fits (otherwise preemption by recomputation)."""
    shares: bool = True
    """Whether equal prefixes share blocks of the cache."""
    block_size: int = 16
    """Number of tokens per block of the cache."""
    overlap: bool = False
    """Whether an iteration is composed while the previous one is running."""
    kernel: str = ""
    """Library of its attention kernels: flash, narrow (vLLM of 2023 has no tiles, TurboMind and ours narrow ones),
    trtllm, or packed: one call per sequence on views of the pool (CPU)."""
    fused: bool = True
    """Whether it merges products of the same input, and norms with adjacent operators."""
    casts: bool = False
    """Whether a kernel of its own rounds the inputs of each 8-bit product, row by row, and products of few rows read
    them in 16 bits; otherwise norms write 8 bits."""
    worker_s: float = 0.0
    """Additional seconds between iterations for every worker process, of several, to which its inputs are sent."""
    admission_s: float = 0.0
    """Seconds that the first iteration of a request is delayed by its parsing (HTTP, JSON) in parallel with the
    engine."""
    reply_s: float = 0.0
    """Seconds per iteration in a server's process beside the engine's, which makes text of an iteration and sends it
    while the engine computes the next one."""
    token_s: float = 0.0
    """The same per running sequence."""
    expand_share: float = 0.33
    """Relative rate of a prompt's products whose weights are dequantized on the fly (4 bits), with kernels optimized
    for few rows."""
    dense_expand_share: float = 0.0
    """The same for layers without experts, where an engine has kernels for many rows too; 0: it has not."""
    one_shot: bool = True
    """Whether small all-reduces are one kernel over NVLink instead of a library's ring."""
    flash: bool = True
    """Whether attention is one fused kernel whatever the plan says; if not, it is where the plan has flash_attention,
    and elsewhere a product, a softmax and a product."""
    last_apart: bool = False
    """Whether the last token of a prompt is left to the decode step behind it, which gives the first output token."""
    gap_s: float = 0.0
    """Seconds that the GPU is idle between two kernels that are launched individually."""
    stream_share: float = 0.0
    """Fraction of the memory bandwidth at which products of few rows read weights, using the engine's own kernels; 0:
    library kernels."""
    stream_bytes: float = math.inf
    """Maximum bytes per clock and multiprocessor at which they do."""
    code_bytes: float = math.inf
    """The same for 4-bit weights."""
    half_sums: bool = False
    """Whether products of 16-bit operands are summed in 16 bits, which GeForce cards do at twice the rate."""
    wide: bool = False
    """Whether everything but the products' operands is in fp32: operands are converted before, results after."""
    head_bits: float = 16.0
    """Bits of the head's weights, scales included, where the layers' have 4."""
    drained_tokens: int = 0
    """Number of prompt tokens in pieces that overlap over cards, before the next ones start; 0: all."""
    hop_s: float = 0.0
    """Seconds to pass a token or a chunk of a prompt to the next card, where the layers are distributed over cards."""
    logit_reads: int = 1
    """How many times a row of logits is read to choose a token; the first is part of the constants above."""
    memory_share: float = 0.9
    """Fraction of device memory that the engine uses."""
    spill_tokens: int = 0
    """Number of prompt tokens in one eager iteration beyond which each costs ``spill_s`` more; 0: no limit."""
    spill_s: float = 0.0
    budget_of_context: bool = False
    """Whether its server's default for the tokens of an iteration is the longest request's, 2048 at least (vLLM before
    its version 1); ``max_num_batched_tokens`` is then that of static batches."""
    batch_of_user: bool = False
    """Whether it has no limits of its own: its user gives it batches, the largest power of two that fits."""
    source: str = ""
    fitted_on: tuple[str, ...] = ()
    """Devices on which its constants were fitted to measurements."""

    def scheduling(self, techniques: Iterable[Technique]) -> Scheduling:
        """The engine's default scheduling, as changed by the plan's techniques."""
        limits = Limits(self.max_num_seqs, self.max_num_batched_tokens, continuous=self.continuous,
                        chunked=self.chunked, reserve=self.reserves, padded=self.padded)  # fmt: skip
        s = Scheduling(limits=limits, block_size=self.block_size, share_prefixes=self.shares,
                       logit_reads=self.logit_reads)  # fmt: skip
        for t in techniques:
            t.scheduling(s)
        return s


PLANNED = "plan"
"""Used when no engine is named: the schedule follows from the plan."""
BARE: dict[str, Any] = {
    "continuous": False, "chunked": False, "reserves": True, "padded": True, "shares": False, "flash": False,
    "logit_reads": Scheduling.logit_reads,
}  # fmt: skip
"""An engine that only uses the plan's techniques."""

ENGINES: dict[str, EngineCosts] = {
    e.name: e
    for e in (
        EngineCosts(
            "vllm-2023", "vLLM 0.2 (late 2023), eager, Ray workers", False,
            dispatch_s=43e-6, iteration_s=5e-3, schedule_s=0.0, sequence_s=0.3e-3, layer_s=0.0,
            prefill_share=1.0, request_s=20e-3,
            max_num_seqs=256, max_num_batched_tokens=65536, chunked=False, mixes=False, shares=False,
            one_shot=False, budget_of_context=True,
            spill_tokens=2048, spill_s=120e-6, kernel=NARROW, source="fitted to llama2-70b on 2, 4 and 8 A100",
            fitted_on=("a100-80g-sxm",),
        ),
        EngineCosts(
            "vllm", "vLLM V1 (2025), CUDA graphs, chunked prefill", True,
            dispatch_s=8e-6, iteration_s=0.5e-3, schedule_s=0.3e-3, sequence_s=12e-6, layer_s=45e-6,
            prefill_share=0.80, request_s=10e-3,
            max_num_seqs=256, max_num_batched_tokens=8192, chunked=True, dense_expand_share=1.0,
            source="fitted to serving on H100; dense_expand_share: Machete (Neural Magic, October 2024) multiplies many"
            " rows as fast as 16-bit products, and Marlin about so",
            fitted_on=("h100-sxm",),
        ),
        EngineCosts(
            "trtllm", "TensorRT-LLM (2025), CUDA graphs for decode", True,
            dispatch_s=70e-6, iteration_s=1.3e-3, schedule_s=2e-3, sequence_s=20e-6, layer_s=0.2e-3,
            prefill_share=0.80, request_s=30e-3,
            max_num_seqs=256, max_num_batched_tokens=8192, chunked=False, reserves=True, overlap=True,
            kernel="trtllm", dense_expand_share=1.0,
            source="fitted to serving on H100; dispatch_s: about 50 us of its host, an operator of eager PyTorch;"
            " dense_expand_share: assumed as in vLLM",
            fitted_on=("h100-sxm",),
        ),
        EngineCosts(
            "trtllm-0.5", "TensorRT-LLM 0.5 (late 2023), static batches without a server", False,
            dispatch_s=0.0, iteration_s=1.3e-3, schedule_s=0.0, sequence_s=0.0, layer_s=0.0,
            prefill_share=0.80, request_s=0.0,
            max_num_seqs=256, max_num_batched_tokens=65536, chunked=False, mixes=False, reserves=True, shares=False,
            gap_s=4e-6, one_shot=False, source="assumptions: the GPU part of `trtllm`, launched kernel by kernel",
        ),
        EngineCosts(
            "lmdeploy-0.1", "LMDeploy 0.1 (late 2023): TurboMind in C++, eager", False,
            dispatch_s=0.0, iteration_s=0.3e-3, schedule_s=0.0, sequence_s=0.0, layer_s=0.0,
            prefill_share=1.0, request_s=1e-3,
            max_num_seqs=128, max_num_batched_tokens=8192, chunked=False, mixes=False, shares=False,
            one_shot=False, last_apart=True, kernel=NARROW,
            source="assumptions: a C++ loop, which keeps ahead of the GPU, and prompts at vllm-2023's rate; last_apart:"
            " TurboMind's LlamaBatch.cc",
        ),
        EngineCosts(
            "gpt-fast", "gpt-fast (early 2024): torch.compile, one sequence, the step as a CUDA graph", True,
            dispatch_s=0.0, iteration_s=0.1e-3, schedule_s=0.0, sequence_s=0.0, layer_s=0.0,
            prefill_share=1.0, request_s=0.0,
            max_num_seqs=1, max_num_batched_tokens=65536, chunked=False, mixes=False, reserves=True, shares=False,
            code_bytes=6.5, source="code_bytes: one row, llama2-70b int4 on one A100; else assumptions",
        ),
        EngineCosts(
            "mlc", "MLC LLM (late 2023): compiled kernels launched one by one", False,
            dispatch_s=0.0, iteration_s=0.1e-3, schedule_s=0.0, sequence_s=0.0, layer_s=0.0,
            prefill_share=0.80, request_s=0.0,
            max_num_seqs=1, max_num_batched_tokens=65536, chunked=False, mixes=False, reserves=True, shares=False,
            gap_s=4e-6, one_shot=False,
            source="gap_s: the usual time of a launch, set beside six rows of A100 PCIe; else assumptions",
        ),
        EngineCosts(
            "llama.cpp", "llama.cpp (May 2024), CUDA, without CUDA graphs and fused attention", False,
            dispatch_s=0.0, iteration_s=0.2e-3, schedule_s=0.0, sequence_s=0.0, layer_s=0.0,
            prefill_share=0.90, request_s=0.0,
            max_num_seqs=1, max_num_batched_tokens=512, chunked=True, reserves=True, shares=False,
            fused=False, flash=False, gap_s=7e-6, stream_share=0.93, stream_bytes=7.6, hop_s=0.25e-3, expand_share=0.80,
            one_shot=False, half_sums=True, wide=True, head_bits=6.5625, drained_tokens=2048,
            source="fitted to llama3-8b and 70b f16 on RTX 3090 and A100; hop_s: to 2, 4 and 6 RTX 3090",
            fitted_on=("rtx3090", "a100-80g-pcie", "a100-80g-sxm"),
        ),
        EngineCosts(
            "ridgeline", "Ridgeline's own engine, steps as CUDA graphs on GPUs", True,
            dispatch_s=130e-6, iteration_s=70e-6, schedule_s=0.0, sequence_s=20e-6, layer_s=0.0,
            prefill_share=1.0, request_s=4e-3, admission_s=1e-3,
            max_num_seqs=256, max_num_batched_tokens=2048, chunked=False, overlap=True, expand_share=1.0,
            one_shot=False, casts=True, kernel=NARROW,
            source="one H100 (benchmarks/results/gpu_h100): uncaptured steps of Llama 3.2 1B and prompts of 3.1 8B give"
            " dispatch_s, captured decode steps iteration_s and a bound for sequence_s; what requests take, and that"
            " captured prompts cost the host the same, is assumed. `ridgeline probe` measures all of them on a CPU",
            fitted_on=("h100-sxm",),
        ),
    )
}  # fmt: skip
_ASSUMED = "assumptions: what its documentation says of its mechanisms, on the host seconds of `{}`"
ENGINES["vllm-2023-docker"] = replace(
    ENGINES["vllm-2023"], name="vllm-2023-docker", title="vLLM 0.2 in a container without shared memory",
    worker_s=3.4e-3,
    source="vllm-2023; worker_s: three rows of llama2-70b on 2, 4 and 8 A100 PCIe. Docker gives a container 64 MB of"
    " shared memory, and Ray then keeps the objects of its messages in files", fitted_on=("a100-80g-pcie",),
)  # fmt: skip
ENGINES["sglang"] = replace(
    ENGINES["vllm"], name="sglang", title="SGLang (2025), radix cache, schedules while the GPU works",
    overlap=True, mixes=False, block_size=1, source=_ASSUMED.format("vllm"), fitted_on=(),
)  # fmt: skip
ENGINES["tgi"] = replace(
    ENGINES["vllm"], name="tgi", title="Text Generation Inference 2 (2024), CUDA graphs, whole prompts first",
    chunked=False, mixes=False, shares=False, block_size=1, iteration_s=1e-3, max_num_seqs=128,
    max_num_batched_tokens=16384, source=_ASSUMED.format("vllm"), fitted_on=(),
)  # fmt: skip
ENGINES["lightllm"] = replace(
    ENGINES["vllm-2023"], name="lightllm", title="LightLLM (2023), eager, one token a block", block_size=1,
    dispatch_s=20e-6, iteration_s=2e-3, sequence_s=0.1e-3, spill_tokens=0, source=_ASSUMED.format("vllm-2023"),
    fitted_on=(),
)  # fmt: skip
ENGINES["tgi-1"] = replace(
    ENGINES["vllm-2023"], name="tgi-1", title="Text Generation Inference 1 (2023), eager, whole prompts first",
    dispatch_s=ENGINES["lightllm"].dispatch_s, iteration_s=ENGINES["lightllm"].iteration_s, reserves=True,
    max_num_seqs=128, max_num_batched_tokens=4096, budget_of_context=False, spill_tokens=0,
    source="assumptions: what its documentation says of its mechanisms; a launch as in `lightllm`, sequences one by one"
    " as in `vllm-2023`", fitted_on=(),
)  # fmt: skip
ENGINES["hf"] = replace(
    ENGINES["vllm-2023"], name="hf", title="Hugging Face generate, eager: padded batches that run until all end",
    budget_of_context=False, fused=False, dispatch_s=12e-6, iteration_s=1e-3, sequence_s=0.0, request_s=0.0,
    continuous=False, padded=True, reserves=True, mixes=True, flash=False, spill_tokens=0, batch_of_user=True,
    source="assumptions: a launch out of Python for every operator; flash: `attn_implementation` is the user's",
    fitted_on=(),
)  # fmt: skip
ENGINES[OWN] = replace(ENGINES[OWN], **BARE)
ENGINES[PLANNED] = replace(
    ENGINES["vllm"], name=PLANNED, title="The plan's schedule on vLLM's host time", fitted_on=(), **BARE
)
ALIASES = {
    "transformers": "hf",
    "text-generation-inference": "tgi",
    "tensorrt-llm": "trtllm",
    "tensorrt": "trtllm",
    "vllm-v1": "vllm",
}
"""Alternative spellings."""

HOST_SPEED = {"hopper": 0.70, "blackwell": 0.60, "ada": 0.8, "cdna3": 0.75}
"""Host seconds relative to a DGX A100's, by the device's architecture: servers use the hosts of their year. Assumptions
based on the hosts' single-thread speeds; only Hopper's enters the fits, and there it scales constants that are fitted
on Hopper anyway, so no open data tests these ratios."""


def find_engine(name: str, device: Device, ranks: int = 1) -> EngineCosts:
    """The engine called ``name``, with its host seconds as measured, or scaled to the device's usual host. Without a
    name: Ridgeline's own on this machine; elsewhere the host seconds of vLLM and a schedule that follows only from the
    plan. ``ranks``: as of :func:`own_engine`."""
    key = engine_name(name, device.name) or PLANNED
    key = ALIASES.get(key, key)
    if key not in ENGINES:
        raise unknown("engine", name, [*ENGINES, *ALIASES])
    if key == OWN and device.kind == "cpu":
        return own_engine(device, ranks)
    engine, speed = ENGINES[key], HOST_SPEED.get(device.architecture.lower(), 1.0)
    return replace(
        engine,
        dispatch_s=engine.dispatch_s * speed,
        iteration_s=engine.iteration_s * speed,
        worker_s=engine.worker_s * speed,
        schedule_s=engine.schedule_s * speed,
        sequence_s=engine.sequence_s * speed,
        layer_s=engine.layer_s * speed,
        request_s=engine.request_s * speed,
        spill_s=engine.spill_s * speed,
    )


def own_engine(device: Device, ranks: int = 1) -> EngineCosts:
    """Ridgeline's own engine on a CPU, which runs operators synchronously. ``ranks``: over which its model is divided;
    as ``ridgeline bench`` runs it, the first of several has HTTP and text in its process."""
    bare = replace(ENGINES[OWN], graphs=False, dispatch_s=0.0, iteration_s=0.4e-3, sequence_s=60e-6, kernel="packed",
                   fused=False, overlap=False)  # fmt: skip
    engine, known = bare, device.host_latency
    if "serve.reply" not in known:  # not probed, or by an older version
        return engine
    apart = known.get("serve.apart", 0.0) if ranks == 1 else 0.0  # 1: the engine has a process of its own
    beside = 1.0 - apart
    return replace(
        engine,
        iteration_s=known["serve.iteration"] + beside * known["serve.reply"],
        sequence_s=known["serve.sequence"] + beside * known["serve.token"],
        reply_s=apart * known["serve.reply"],
        token_s=apart * known["serve.token"],
        request_s=known["serve.request"],
        admission_s=known["serve.admission"],
        source="measured on this machine",
        fitted_on=(device.name,),
    )


def engine_of(e: Experiment) -> EngineCosts | None:
    """The engine of an inference experiment; None: plain generation with the torch model."""
    name: str = getattr(e.workload, "engine", "")
    return find_engine(name, e.cluster.device) if name else None
