"""Fine-tuning through frozen remote blocks: a client trains a soft prompt, or low-rank updates of the blocks' linear
layers, which travel with each request; servers keep nothing (arXiv:2209.01188, section 2.2).

Shapes: B batch, S sequence, P tokens of the soft prompt, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ridgeline.nn.model.loss import IGNORE, token_loss
from ridgeline.nn.model.transformer import Transformer
from ridgeline.serve.transfer.frames import BadPeer
from ridgeline.spec.errors import UserError
from ridgeline.spec.targets import chosen
from ridgeline.swarm.announcements import Announcement
from ridgeline.swarm.client import Swarm
from ridgeline.swarm.link import TROUBLE
from ridgeline.swarm.policies import Hop
from ridgeline.swarm.server import pack_lora, unpack_lora
from ridgeline.swarm.span import LoRA
from ridgeline.swarm.wire import encode_rows
from ridgeline.swarm.worker import MOST_ROWS

Passed = list[tuple[Hop, Tensor]]
"""What went into each hop of a forward pass."""


def forward(swarm: Swarm, x: Tensor, start: int, stop: int, lora: LoRA) -> tuple[Tensor, Passed]:
    """``x`` [B, S, H] through blocks ``start`` to ``stop`` at whatever servers there are → [B, S, H], and what is
    needed for :func:`backward`. A server that fails is replaced."""
    passed: Passed = []
    while start < stop:
        server, hop = swarm.route(start, stop, training=True)[0]
        try:
            with swarm.watching(server):
                y, _ = _ask(swarm, server, "forward", hop, {"x": x}, lora)
        except TROUBLE:
            continue
        passed.append((hop, x))
        x, start = y, hop.stop
    return x, passed


def backward(swarm: Swarm, grad: Tensor, passed: Passed, lora: LoRA) -> tuple[Tensor, LoRA]:
    """Gradients of what went into the first hop and of the updates, from that of what came out of the last."""
    found: LoRA = {}
    left = list(passed)
    while left:
        hop, x = left.pop()
        ways = swarm.route(hop.start, hop.stop, training=True)
        if len(ways) > 1:  # nobody has all of these blocks any more
            left += forward(swarm, x, hop.start, hop.stop, lora)[1]
            continue
        try:
            with swarm.watching(ways[0][0]):
                grad, own = _ask(swarm, ways[0][0], "backward", hop, {"x": x, "grad": grad}, lora)
        except TROUBLE:
            left.append((hop, x))
            continue
        found |= own
    return grad, found


def _ask(
    swarm: Swarm, server: Announcement, op: str, hop: Hop, given: dict[str, Tensor], lora: LoRA
) -> tuple[Tensor, LoRA]:
    batch, length, _ = given["x"].shape
    message = {"batch": batch, "length": length, "start": hop.start, "stop": hop.stop, "wire": swarm.wire}
    here = {name: pair for name, pair in lora.items() if hop.start <= int(name.split(".")[1]) < hop.stop}
    tensors = pack_lora(here)
    for name, x in given.items():
        tensors |= encode_rows(name, x, swarm.wire)
    answer = swarm.ask(server.address, op, message, tensors)
    out = swarm.rows(answer, "y" if op == "forward" else "grad", tuple(given["x"].shape), given["x"].dtype)
    if op == "forward":
        return out, {}
    grads = unpack_lora(answer.tensors)
    if {n: (a.shape, b.shape) for n, (a, b) in grads.items()} != {n: (a.shape, b.shape) for n, (a, b) in here.items()}:
        raise BadPeer("it sent gradients of other updates than it was given")
    return out, grads


class _Blocks(torch.autograd.Function):
    """All blocks of a swarm as one differentiable function of its input and the updates."""

    @staticmethod
    def forward(ctx: Any, swarm: Swarm, names: list[str], x: Tensor, *updates: Tensor) -> Tensor:
        lora = dict(zip(names, zip(updates[::2], updates[1::2], strict=True), strict=True))
        y, ctx.passed = forward(swarm, x.detach(), 0, swarm.spec.num_layers, lora)
        ctx.swarm, ctx.names = swarm, names
        ctx.save_for_backward(*updates)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        lora = dict(zip(ctx.names, zip(saved[::2], saved[1::2], strict=True), strict=True))
        dx, found = backward(ctx.swarm, grad, ctx.passed, lora)
        return None, None, dx, *(t for name in ctx.names for t in found[name])


def _through(*args: Any) -> Tensor:
    out: Tensor = _Blocks.apply(*args)  # type: ignore[no-untyped-call]
    return out


class RemoteModel(nn.Module):
    """A client's model: its own embedding and head, the swarm's blocks between, and what it trains."""

    def __init__(
        self, ends: Transformer, swarm: Swarm, prompt_tokens: int = 0, rank: int = 0,
        targets: tuple[str, ...] = ("q_proj", "v_proj"), seed: int = 0,
    ) -> None:  # fmt: skip
        """``prompt_tokens``: P, of the soft prompt (arXiv:2104.08691), drawn from the embeddings' scale; ``rank``: of
        the updates of the linear layers ``targets``. Raises :class:`UserError` where nothing would train."""
        super().__init__()
        if not prompt_tokens and not rank:
            raise UserError("nothing would train", "give tokens of a soft prompt, or a rank of updates")
        spec, rng = ends.spec, torch.Generator().manual_seed(seed)
        self.ends, self.swarm = [ends], swarm  # in a list: its parameters are not this module's
        assert ends.embed is not None
        table = ends.embed.tokens.weight
        prompt = table.float().std() * torch.randn(prompt_tokens, spec.hidden_size, generator=rng)
        self.prompt = nn.Parameter(prompt.to(table.dtype)) if prompt_tokens else None
        self.names: list[str] = []
        self.updates = nn.ParameterList()
        sizes = chosen(spec, targets) if rank else {}
        if rank and not sizes:
            raise UserError(f"{', '.join(targets)} match no linear layer of {spec.name}", "give q_proj, v_proj, …")
        for name, (out, width) in sizes.items():
            self.names.append(name)
            self.updates.append((torch.randn(rank, width, generator=rng) / width**0.5).to(table.dtype))
            self.updates.append(torch.zeros(out, rank, dtype=table.dtype))

    def trained(self) -> dict[str, Tensor]:
        """What was trained, by name: ``prompt`` [P, H], and ``NAME.lora_a`` and ``NAME.lora_b`` of each layer."""
        out = {} if self.prompt is None else {"prompt": self.prompt.detach()}
        for i, name in enumerate(self.names):
            out |= {f"{name}.lora_{part}": self.updates[2 * i + k].detach() for k, part in enumerate("ab")}
        return out

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over the labeled tokens of ``ids`` [B, S]; ``labels`` as in :func:`token_loss`."""
        (ends,) = self.ends
        assert ends.embed is not None
        assert ends.head is not None
        if ends.spec.position == "learned" and self.prompt is not None:
            raise UserError(f"{ends.spec.name} has learned positions, which a soft prompt would shift", "train updates")
        x = ends.embed(ids, None, None)
        if self.prompt is not None:
            x = torch.cat([self.prompt.expand(len(ids), -1, -1), x], 1)
            labels = torch.cat([labels.new_full((len(ids), len(self.prompt)), IGNORE), labels], 1)
        parts = x.split(max(1, MOST_ROWS // x.shape[1]))
        y = torch.cat([_through(self.swarm, self.names, part, *self.updates) for part in parts])
        hidden = y if ends.norm is None else ends.norm(y)
        loss, count = token_loss(hidden, ends.head, labels)
        return loss / count
