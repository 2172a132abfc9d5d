"""A server's blocks: loaded alone, hashed, and computed for many clients in one packed batch.

Shapes: T rows of a step, B batch, S sequence, H hidden.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ridgeline.nn.checkpoint.checkpoint import load_into
from ridgeline.nn.checkpoint.files import config_dtype
from ridgeline.nn.memory.decoder import find_decoder
from ridgeline.nn.model.init import allocate
from ridgeline.nn.model.transformer import Transformer
from ridgeline.runtime.build import Build
from ridgeline.serve.block_manager import Blocks
from ridgeline.serve.runner import PackedStep, Runner
from ridgeline.serve.sequence import Sequence
from ridgeline.serve.transfer.frames import BadPeer
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Call
from ridgeline.spec.workload import Generate
from ridgeline.swarm.link import Refused
from ridgeline.techniques.registry import make

BLOCK = 16
"""Tokens of a cache block."""
LoRA = dict[str, tuple[Tensor, Tensor]]
"""Low-rank updates by the name of their linear layer (``layers.3.attention.q_proj``): A [rank, in] and B [out, rank],
which holds the scale too."""


def identity(spec: ModelSpec) -> str:
    """What peers must agree on to talk at all: the architecture, whatever the model is called."""
    return "swarm " + hashlib.sha256(spec.model_dump_json(exclude={"name"}).encode()).hexdigest()


def load_blocks(path: Path, spec: ModelSpec, blocks: range, ends: bool = False) -> Transformer:
    """Some blocks of the checkpoint in directory ``path``; ``ends``: with embedding, final norm and head."""
    with torch.device("meta"):
        model = Transformer(spec)
    model.layers = nn.ModuleDict({str(i): model.layers[str(i)] for i in blocks})
    if not ends:
        model.embed = model.norm = model.head = None
    allocate(model, "cpu", config_dtype(path))
    load_into(model, path)
    return model.requires_grad_(False)


def block_hashes(model: Transformer) -> list[str]:
    """One hash of each block's weights, in order."""
    out = []
    for block in model.layers.values():
        digest = hashlib.sha256()
        for name, p in sorted(block.named_parameters()):
            digest.update(f"{name} {p.dtype} {list(p.shape)}".encode())
            digest.update(p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        out.append(digest.hexdigest()[:16])
    return out


def change_weights(model: Transformer, plan: str) -> None:
    """Let a technique of the plan change the weights (``smooth_int8``). Raises :class:`UserError` for another."""
    if not plan:
        return
    technique = make(Call.parse(plan))
    if "weights" not in technique.parts or "generate" not in technique.card.tasks or technique.phase != "adapt":
        raise UserError(f"{plan} is no format of weights", "give --with smooth_int8, rtn:bits=4, or none")
    device = Device(name="local", kind="cpu", peak_flops={"fp32": 1.0}, memory_bytes=1.0, memory_bandwidth=1.0)
    e = Experiment(model=model.spec, cluster=Cluster(device=device), workload=Generate(prompt_len=1, output_len=1))
    technique.apply(Build(e, model, torch.device("cpu")))
    model.requires_grad_(False)


@dataclass(eq=False)
class Held:
    """A client's sequence: its place in the cache of blocks ``start`` to ``stop``."""

    owner: str
    """The connection that opened it."""
    start: int
    stop: int
    most: int
    """Tokens that it may grow to."""
    asked: int = 0
    """Tokens that were sent, computed or not yet."""
    table: Sequence = field(default_factory=lambda: Sequence(cast(Any, None), 0, []))  # no request is behind it

    @property
    def length(self) -> int:
        """Tokens that were computed."""
        return self.table.n_computed


class SpanEngine:
    """Blocks ``start`` to ``stop`` of a model. For one thread."""

    def __init__(self, model: Transformer, cache_tokens: int) -> None:
        names = list(model.layers)
        self.model, self.start, self.stop = model, int(names[0]), int(names[-1]) + 1
        spec = model.spec
        count = max(1, -(-cache_tokens // BLOCK))
        self.longest = min(spec.max_positions, count * BLOCK)
        """Tokens of a sequence at most."""
        model.set_attention("flash")
        self.runner = Runner(model, count * BLOCK, BLOCK, self.longest)
        self.runner.decoder = find_decoder(model)
        self.blocks = Blocks(count, BLOCK, share=False)
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.reserved = 0
        """Blocks that open sequences may grow to."""

    @property
    def room(self) -> int:
        """Tokens that new sequences may grow to."""
        return (self.blocks.count - self.reserved) * BLOCK

    def require(self, start: int, stop: int) -> None:
        """Raise :class:`Refused` unless these blocks are here."""
        if not self.start <= start < stop <= self.stop:
            raise Refused(f"it has blocks {self.start} to {self.stop}, not {start} to {stop}")

    def open(self, owner: str, start: int, stop: int, most: int) -> Held:
        """A new sequence of up to ``most`` tokens. Raises :class:`Refused`."""
        self.require(start, stop)
        if not 0 < most <= self.longest:
            raise Refused(f"{most} tokens are more than the {self.longest} that the model takes")
        if self.blocks.needed(most) > self.blocks.count - self.reserved:
            raise Refused(f"the cache has room for {self.room} tokens, not {most}")
        self.reserved += self.blocks.needed(most)
        return Held(owner, start, stop, most)

    def close(self, held: Held) -> None:
        """Forget a sequence."""
        self.blocks.release(held.table)
        self.reserved -= self.blocks.needed(held.most)

    def step(self, batch: list[tuple[Held, Tensor]]) -> list[Tensor]:
        """Compute the next rows [n, H] of several sequences with the same blocks → theirs, behind those blocks.
        Sequences must have room for them (:meth:`take`)."""
        step = PackedStep([])
        for held, x in batch:
            at = held.length
            copies = self.blocks.grow(held.table, at + len(x), held.most)
            assert copies == [], "the cache has room for every sequence that was opened"
            row = len(step.at)
            step.at += range(at, at + len(x))
            step.pieces.append(self.runner.piece(held.table, row, at, at + len(x), step.slots))
        first = batch[0][0]
        names = tuple(str(i) for i in range(first.start, first.stop))
        out = self.runner.execute_rows(step, torch.cat([x for _, x in batch]), names)
        for held, x in batch:
            held.table.n_computed += len(x)
        return list(out.split([len(x) for _, x in batch]))

    @staticmethod
    def take(held: Held, at: int, rows: int) -> None:
        """Expect ``rows`` of a sequence. Raises :class:`BadPeer` unless they come next."""
        if at != held.asked:
            raise BadPeer(f"it sent rows from {at} of a sequence, where {held.asked} was due")
        if not 0 < rows <= held.most - at:
            raise BadPeer(f"it sent {rows} rows behind {at} of a sequence of {held.most} at most")
        held.asked += rows

    # ---- training through frozen blocks ------------------------------------------------------------------------------

    def part(self, start: int, stop: int) -> Transformer:
        """Some of the blocks as a model that shares its modules with this one."""
        self.require(start, stop)
        model = copy.copy(self.model)
        model._modules = dict(self.model._modules)
        model.layers = nn.ModuleDict({str(i): self.model.layers[str(i)] for i in range(start, stop)})
        return model

    def forward(self, x: Tensor, start: int, stop: int, lora: LoRA) -> Tensor:
        """``x`` [B, S, H] through blocks ``start`` to ``stop``, with a client's updates; nothing is kept."""
        with torch.no_grad(), updated(self.model, lora):
            out: Tensor = self.part(start, stop)(x)
        return out

    def backward(self, x: Tensor, grad: Tensor, start: int, stop: int, lora: LoRA) -> tuple[Tensor, LoRA]:
        """Gradients of the input ``x`` and of a client's updates, from that of the output; the blocks are computed
        again (arXiv:2209.01188, section 2.2)."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            own = {n: (a.detach().requires_grad_(), b.detach().requires_grad_()) for n, (a, b) in lora.items()}
            with updated(self.model, own):
                out = self.part(start, stop)(x)
            leaves = [x, *(t for pair in own.values() for t in pair)]
            found = torch.autograd.grad(out, leaves, grad.to(out.dtype))
        pairs = zip(found[1::2], found[2::2], strict=True)
        return found[0], dict(zip(own, pairs, strict=True))


@contextlib.contextmanager
def updated(model: Transformer, lora: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Add low-rank updates to linear layers: y + (x Aᵀ) Bᵀ (arXiv:2106.09685). Raises :class:`BadPeer` for shapes or
    names that do not fit."""
    handles = []
    try:
        for name, (a, b) in lora.items():
            try:
                linear = model.get_submodule(name)
            except AttributeError:
                raise BadPeer(f"it sent an update of {name[:80]!r}, which is not here") from None
            sizes = getattr(linear, "out_features", 0), getattr(linear, "in_features", 0)
            if a.dim() != 2 or b.dim() != 2 or (b.shape[0], a.shape[1]) != sizes or a.shape[0] != b.shape[1]:
                raise BadPeer(f"it sent an update of {name} with shapes {list(b.shape)} and {list(a.shape)}")

            def add(_: nn.Module, inputs: tuple[Tensor, ...], y: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
                return y + (inputs[0] @ a.t()) @ b.t()

            handles.append(linear.register_forward_hook(add))
        yield
    finally:
        for handle in handles:
            handle.remove()
