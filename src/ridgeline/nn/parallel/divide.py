"""The torch implementation of tensor and sequence parallelism: modules that compute on their part of a divided
parameter.

Parameters become ``DTensor`` s on the tensor-parallel axis, so that sharding, checkpoints and norms know what they
are; the arithmetic runs on plain local tensors with the collectives of :mod:`ridgeline.nn.parallel.collectives`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ridgeline.nn.adapters.lora_linear import LoRALinear
from ridgeline.nn.kernels import products
from ridgeline.nn.kernels.products import is_linear
from ridgeline.nn.model.attention import Attention
from ridgeline.nn.model.loss import IGNORE, token_loss
from ridgeline.nn.model.moe import MoE
from ridgeline.nn.model.transformer import InputEmbedding, MLMHead, Transformer
from ridgeline.nn.parallel.collectives import batch_parts, enter, leave, linear, local, own_part, rms_norm_of_parts
from ridgeline.nn.quant.quantized import QuantizedLinear
from ridgeline.spec.model import COLUMN, LATENT, ROW
from ridgeline.spec.sharding import DIVIDED, IN_PARTS, Sharding, Strategy

Partial = Literal["never", "sequence", "always"]
"""When a replicated parameter's gradient is partial: only if it works on a part of the sequence, or always."""


def divided(whole: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """``whole``, which every rank holds, as a ``DTensor`` with memory for this rank's part only."""
    d = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    part = d.to_local().clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(part, mesh, [placement], run_check=False, shape=d.shape, stride=d.stride())


@dataclass
class Divider:
    """Divides the modules of a transformer over the ranks of ``mesh`` (one axis)."""

    mesh: DeviceMesh
    sequence: bool = False
    """Whether activations between the divided layers are divided along the sequence."""
    sharding: Sharding | None = None
    """A strategy for every part of the model; None: all weights are divided, as ``sequence`` says."""
    _replicated: list[tuple[nn.Module, str, Partial]] = field(default_factory=list)
    _placed: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)

    @property
    def group(self) -> ProcessGroup:
        """The ranks that share every layer."""
        return self.mesh.get_group()

    @property
    def partial(self) -> list[tuple[nn.Module, str]]:
        """Replicated parameters, as (module, name), of which each rank's gradient is only a part of the whole."""
        wanted = ("always", "sequence") if self.sequence else ("always",)
        found = {id(getattr(m, name)): (m, name) for m, name, when in self._replicated if when in wanted}
        return list(found.values())

    def place(self, module: nn.Module, name: str, placement: Placement, is_partial: Partial = "never") -> None:
        """Replace a parameter by this rank's part of it (shared ones once)."""
        p = getattr(module, name, None)
        if not isinstance(p, nn.Parameter):
            return
        if p not in self._placed:
            self._placed[p] = nn.Parameter(divided(p.detach(), self.mesh, placement), requires_grad=p.requires_grad)
        module.register_parameter(name, self._placed[p])
        self._replicated.append((module, name, is_partial))

    def transformer(self, model: Transformer) -> None:
        """Divide a whole model, or those of its layers and ends that this rank has."""
        plan = self.sharding or Sharding.uniform("reduce", model.spec.num_layers)
        for name, block in model.layers.items():
            self.block(block, *plan.of_layer(int(name)))
            if self.sharding:
                parts, wanted = plan.leaves_in_parts(int(name) - 1), plan.leaves_in_parts(int(name))
                block.register_forward_pre_hook(partial(self._entering, parts, wanted))
        if model.embed is not None:
            self.embedding(model.embed, plan.embed)
        if model.norm is not None:
            self.rest(model.norm, plan.head)
            if self.sharding:
                parts, wanted = plan.leaves_in_parts(len(plan.mlp) - 1), plan.head in IN_PARTS
                model.norm.register_forward_pre_hook(partial(self._entering, parts, wanted))
        if model.head is not None:
            if isinstance(model.head, MLMHead):
                self.rest(model.head.dense)
                self.rest(model.head.norm)
            if plan.head in DIVIDED:
                self.column(model.head.out, plan.head)
            else:
                self.rest(model.head.out, plan.head)

    def _entering(self, parts: bool, wanted: bool, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs of ``module`` with the residual stream in the form that it reads."""
        return batch_parts(given[0], self.group, parts, wanted), *given[1:]

    def block(self, block: nn.Module, attention: Strategy = "reduce", mlp: Strategy = "reduce") -> None:
        """One layer: attention heads and feed-forward columns are divided, norms are not."""
        for name, child in block.named_children():
            if name not in ("attention", "mlp"):
                self.rest(child, attention)  # both parts of a layer keep the stream in the same form
                continue
            strategy = attention if name == "attention" else mlp
            if strategy not in DIVIDED:
                for module in child.modules():
                    self.rest(module, strategy)
                continue
            wrap = self._moe if isinstance(child, MoE) else self._inside
            child.forward = partial(wrap, child.forward, strategy)
            if isinstance(child, MoE):
                self._experts(child)
                continue
            if isinstance(child, Attention):
                self.place(child, "sinks", Shard(0))
                child.keep_slopes(self.group.rank(), self.group.size())
            for leaf, module in child.named_children():
                if leaf in COLUMN:
                    self.column(module)
                elif leaf in ROW:
                    self.row(module, strategy)
                elif leaf in LATENT:  # whole on every rank, which sees only the gradient through its heads
                    self._whole(module)
                elif child.joint_norm:  # over the heads of all ranks
                    size = int(module.weight.shape[0])  # type: ignore[index]
                    self.place(module, "weight", Shard(0))
                    module.forward = partial(rms_norm_of_parts, module, size, self.group)
                else:  # norms over each head: a rank sees only its heads
                    self.place(module, "weight", Replicate(), "always")

    def _experts(self, child: MoE) -> None:
        """Each rank's part of the experts' output weighs in the router's gradient."""
        self.place(child.router, "weight", Replicate(), "always")
        child.router.forward = partial(_replicated, child.router)  # type: ignore[method-assign]
        self.place(child.router, "bias", Replicate(), "always")
        self.place(child, "score_bias", Replicate())
        if child.shared is not None:
            self._shared(child.shared)
        for leaf, dim in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 2), ("gate_bias", 1), ("up_bias", 1)):
            self.place(child.experts, leaf, Shard(dim))
        self.place(child.experts, "down_bias", Replicate(), "always")
        child.experts.bias_share = 1 / self.group.size()

    def _shared(self, mlp: nn.Module) -> None:
        """An MLP beside experts: its partial output is summed with theirs."""
        for leaf, module in mlp.named_children():
            if leaf in ROW:
                self._partial(module)
            else:
                self.column(module)
                base = module.base if isinstance(module, LoRALinear) else module
                if is_linear(base):  # the router and the experts keep the whole input, so it reads that too
                    base.forward = partial(_replicated, base)  # type: ignore[method-assign]

    def _whole(self, module: nn.Module) -> None:
        if isinstance(module, LoRALinear):
            for name in ("lora_a", "lora_b", "lora_m"):
                self.place(module, name, Replicate(), "always")
            module = module.base
        for name, _ in list(module.named_parameters(recurse=False)):
            self.place(module, name, Replicate(), "always")
        if is_linear(module):
            module.forward = partial(_replicated, module)  # type: ignore[method-assign]

    def rest(self, module: nn.Module, strategy: Strategy = "reduce") -> None:
        """What every rank replicates, and applies to a part of the sequence or of the batch."""
        for name, _ in list(module.named_parameters(recurse=False)):
            self.place(module, name, Replicate(), "always" if strategy in IN_PARTS else "sequence")
        if isinstance(module, nn.Linear):
            module.forward = partial(_replicated, module)  # type: ignore[method-assign]

    def stream(self, layer: int, batch: int, length: int) -> tuple[int, int]:
        """(sequences, tokens of each) of the residual stream that a rank has behind ``layer``."""
        if self.sharding and self.sharding.leaves_in_parts(layer):
            return batch // self.group.size(), length
        return batch, length // self.group.size() if self.sequence else length

    def _dim(self, strategy: Strategy) -> int | None:
        """The dimension along which the residual stream beside a divided layer is in parts; None: it is whole."""
        return 0 if strategy == "scatter" else 1 if self.sequence else None

    # ---- linear layers ----------------------------------------------------------------------------------------------

    def column(self, module: nn.Module, enters: Strategy | None = None) -> None:
        """Divide a linear layer by output. ``enters``: its input is the residual stream, in the form of this
        strategy."""
        if isinstance(module, LoRALinear):
            self.place(module, "lora_a", Replicate(), "always")
            self.place(module, "lora_b", Shard(0))
            self.place(module, "lora_m", Shard(0))
            module = module.base
        if isinstance(module, QuantizedLinear):
            for name in module.stored:
                self.place(module, name, Shard(0))
        else:
            self.place(module, "weight", Shard(0))
            module.forward = partial(self._column, module, enters)
        self.place(module, "bias", Shard(0))

    def row(self, module: nn.Module, strategy: Strategy = "reduce") -> None:
        """Divide a linear layer by input; its output is the sum over the ranks."""
        base = self._partial(module)
        self.place(base, "bias", Replicate(), "always" if strategy in IN_PARTS else "sequence")
        module.forward = partial(self._row, base, module.forward, strategy)

    def _partial(self, module: nn.Module) -> nn.Module:
        """Divide a linear layer's weight by input; returns the layer inside an adapter."""
        base = module
        if isinstance(module, LoRALinear):
            self.place(module, "lora_a", Shard(1))
            self.place(module, "lora_b", Replicate(), "always")
            base = module.base
        if isinstance(base, QuantizedLinear):
            for name in base.stored:
                self.place(base, name, Shard(1) if base.cut_by_input(name) else Replicate())
            base.forward = base.product  # type: ignore[method-assign]
        else:
            self.place(base, "weight", Shard(1))
            base.forward = partial(_product, base)
        return base

    def _column(self, module: Any, enters: Strategy | None, x: Tensor) -> Tensor:
        if enters:
            x = enter(x, self.group, self._dim(enters))
        return linear(x, local(module.weight), None if module.bias is None else local(module.bias))

    def _row(self, base: Any, inner: Callable[[Tensor], Tensor], strategy: Strategy, x: Tensor) -> Tensor:
        y = leave(inner(x), self.group, self._dim(strategy))
        return y if base.bias is None else y + local(base.bias).to(y.dtype)  # once, to the sum

    def _inside(self, inner: Callable[..., Tensor], strategy: Strategy, x: Tensor, *args: Any) -> Tensor:
        return inner(enter(x, self.group, self._dim(strategy)), *args)

    def _moe(self, inner: Callable[..., Tensor], strategy: Strategy, x: Tensor, *args: Any) -> Tensor:
        dim = self._dim(strategy)
        return leave(inner(enter(x, self.group, dim), *args), self.group, dim)

    # ---- vocabulary -------------------------------------------------------------------------------------------------

    def embedding(self, embed: InputEmbedding, strategy: Strategy = "reduce") -> None:
        """Divide the vocabulary; a rank looks up the tokens it holds, and the sum is complete. Or divide the batch."""
        if strategy not in DIVIDED:
            for module in embed.modules():
                self.rest(module, strategy)
            embed.tokens.forward = partial(_looked_up, embed.tokens)  # type: ignore[method-assign]
            if strategy == "batch":
                embed.forward = partial(self._of_own_rows, embed.forward)  # type: ignore[method-assign]
            return
        size = embed.tokens.num_embeddings
        self.place(embed.tokens, "weight", Shard(0))
        embed.tokens.forward = partial(self._lookup, embed.tokens, size, strategy)  # type: ignore[method-assign]
        for table in (embed.positions, embed.token_types):
            if table is not None:
                self.place(table, "weight", Replicate(), "always" if strategy in IN_PARTS else "sequence")
        embed.part = self._part
        if embed.norm is not None:
            self.rest(embed.norm, strategy)

    def _of_own_rows(self, inner: Callable[..., Tensor], ids: Tensor, *args: Any) -> Tensor:
        return inner(own_part(ids, self.group), *args)

    def _lookup(self, tokens: nn.Embedding, size: int, strategy: Strategy, ids: Tensor) -> Tensor:
        first, last = vocabulary_part(size, self.group)
        mine = (ids >= first) & (ids < last)
        found = nn.functional.embedding((ids - first).masked_fill(~mine, 0), local(tokens.weight))
        return leave(found.masked_fill_(~mine.unsqueeze(-1), 0), self.group, self._dim(strategy))

    def _part(self, rows: Tensor) -> Tensor:
        return rows.chunk(self.group.size(), -2)[self.group.rank()] if self.sequence else rows

    def loss(self, hidden: Tensor, head: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of token losses over a divided vocabulary or batch, as :func:`ridgeline.nn.model.loss.token_loss`."""
        strategy = self.sharding.head if self.sharding else "reduce"
        if strategy == "whole":
            return token_loss(hidden, head, labels)
        if strategy == "batch":
            own = token_loss(hidden, head, own_part(labels, self.group))[0]
            return leave(own, self.group, None), (labels != IGNORE).sum()
        size = head.out.weight.shape[0]
        logits = head(hidden)
        flat, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        total = _CrossEntropy.apply(flat, labels, self.group, size)  # type: ignore[no-untyped-call]
        return total, (labels != IGNORE).sum()


def vocabulary_part(size: int, group: ProcessGroup) -> tuple[int, int]:
    """First and one past the last token that this rank holds; DTensor's cut: equal parts, the last ones short."""
    each = -(-size // group.size())
    first = min(size, each * group.rank())
    return first, min(size, first + each)


def _replicated(module: nn.Linear, x: Tensor) -> Tensor:
    return products.linear(x, local(module.weight), None if module.bias is None else local(module.bias))


def _looked_up(tokens: nn.Embedding, ids: Tensor) -> Tensor:
    return nn.functional.embedding(ids, local(tokens.weight))


def _product(module: nn.Module, x: Tensor) -> Tensor:
    return products.linear(x, local(module.weight))  # type: ignore[arg-type]


class _CrossEntropy(torch.autograd.Function):
    """:class:`ridgeline.nn.model.loss._CrossEntropy` over a divided vocabulary (arXiv:1909.08053, section 3).

    The ranks exchange each row's maximum (4 bytes), then its sum of exponentials and its label's logit (8 bytes).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: ProcessGroup, size: int) -> Tensor:
        first, last = vocabulary_part(size, group)
        valid = (labels != IGNORE).unsqueeze(1)
        mine = ((labels >= first) & (labels < last)).unsqueeze(1)
        target = (labels - first).clamp(0, max(0, last - first - 1)).unsqueeze(1)
        x = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        peak = x.amax(1, keepdim=True)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        x = x.sub_(peak)
        picked = x.gather(1, target).masked_fill_(~mine, 0)
        x = x.exp_()
        sums = torch.cat((x.sum(1, keepdim=True), picked), 1)
        dist.all_reduce(sums, group=group)
        total, picked = sums[:, :1], sums[:, 1:]
        loss = (total.log() - picked).mul_(valid).sum()
        if ctx.needs_input_grad[0]:
            x.mul_(valid / total).scatter_add_(1, target, -(valid & mine).to(x.dtype))
            ctx.save_for_backward(x if x is logits else logits.copy_(x))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(scale), None, None, None
