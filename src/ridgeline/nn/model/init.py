"""Deterministic weights: the same for the same seed, independent of device, dtype and how the model is divided."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ridgeline.nn.kernels.products import choose_products
from ridgeline.nn.model.transformer import Transformer
from ridgeline.nn.parallel.dtensor import is_dtensor
from ridgeline.spec.model import ModelSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Torch's dtype of each storage dtype of the spec."""
_STD = 0.02
_AHEAD = 1 << 30
"""Numbers that are drawn ahead at most, but for one tensor: 4 GB in fp32."""
_RESIDUAL = ("o_proj", "o_proj.weight", "down_proj", "down_proj.weight")


def build(
    spec: ModelSpec, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Transformer:
    """The model of ``spec`` with newly initialized weights. On device "meta": shapes only."""
    with torch.device("meta"):
        model = Transformer(spec)
    if torch.device(device).type == "meta":
        return model.to(dtype)
    materialize(model, device, dtype, seed)
    return model


def materialize(
    model: Transformer, device: torch.device | str, dtype: torch.dtype = torch.float32, seed: int = 0
) -> None:
    """Allocate a meta-device model on ``device``, and initialize it from ``seed``."""
    allocate(model, device, dtype)
    init_weights(model, seed)


def allocate(model: Transformer, device: torch.device | str, dtype: torch.dtype) -> None:
    """Allocate uninitialized memory of ``dtype`` on ``device`` for a meta-device model."""
    model.to(dtype)
    model.to_empty(device=device)
    model.tie()  # to_empty gives every reference to a shared parameter its own memory
    if torch.device(device).type == "cpu":
        choose_products(model)


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> None:
    """Initialize every parameter: normal(0, 0.02), norms 1, biases 0, projections into the residual stream with a
    smaller deviation, embeddings beside relative positions normal(0, 1) as T5's, whose logits are scaled down.

    Those are scaled by 1/√(2·layers), as in GPT-2. Each parameter has its own random stream, keyed by the seed and its
    name and drawn on the CPU in float32: a pipeline stage, a shard or another device gets exactly the same numbers.
    """
    parameters = list(model.named_parameters())
    for (_, parameter), full in zip(parameters, _drawn(model, parameters, seed), strict=True):
        assign(parameter, full)


def _drawn(model: Transformer, parameters: Sequence[tuple[str, Tensor]], seed: int) -> Iterator[Tensor]:
    """The initial values of ``parameters`` in order, on the CPU: by all cores for weights that go to other memory, as
    a core draws 0.2 billion numbers in a second. On the CPU itself one at a time, so that few are held twice."""
    ahead = max(1, torch.get_num_threads()) if any(p.device.type == "cuda" for _, p in parameters) else 0
    if not ahead:
        for name, parameter in parameters:
            yield _values(model, name, parameter, seed)
        return
    with ThreadPoolExecutor(ahead) as pool:
        waiting: deque[tuple[Future[Tensor], int]] = deque()
        for name, parameter in parameters:
            while waiting and (len(waiting) > ahead or sum(n for _, n in waiting) + parameter.numel() > _AHEAD):
                yield waiting.popleft()[0].result()
            future = pool.submit(lambda n, p: _values(model, n, p, seed).to(p.dtype), name, parameter)
            waiting.append((future, parameter.numel()))
        while waiting:
            yield waiting.popleft()[0].result()


def _values(model: Transformer, name: str, parameter: Tensor, seed: int) -> Tensor:
    full = torch.empty(parameter.shape, dtype=torch.float32)
    if name.endswith("norm.weight"):
        return full.fill_(1 - model.spec.norm_offset)
    if name.endswith((".bias", "_bias", ".sinks")):
        return full.zero_()
    std = _STD / (2 * model.spec.num_layers) ** 0.5 if name.endswith(_RESIDUAL) else _STD
    if name == "embed.tokens.weight" and model.spec.position == "relative":
        std = 1.0
    return full.normal_(0, std, generator=torch.Generator().manual_seed(_stream(seed, name)))


def _stream(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little") >> 1


def assign(parameter: Tensor, full: Tensor) -> None:
    """Copy ``full`` into ``parameter``; into its own shard of it, if the parameter is distributed."""
    if is_dtensor(parameter):
        from torch.distributed.tensor import distribute_tensor

        # Every rank holds the same `full`, so each cuts its part out of its own copy: nothing is sent.
        full = full.to(parameter.device)
        parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None))
    else:
        parameter.copy_(full)
