"""The sparse mixture-of-experts feed-forward layer (arXiv:1701.06538, arXiv:2401.04088).

Shapes: N tokens, E experts, k experts per token, h hidden, f inner width of one expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.model.mlp import ACTIVATIONS, MLP, gated
from ridgeline.nn.model.norm import compute_dtype
from ridgeline.nn.parallel.collectives import local
from ridgeline.spec.model import ModelSpec


class GroupableExperts(nn.Module):
    """A layer's experts, which may be computed all at once where :meth:`groupable` says so."""

    def groupable(self, rows: Tensor) -> bool:
        """Whether :meth:`together` can run on such rows."""
        return False

    def most_rows(self) -> float:
        """The most rows of 16 bits for which :meth:`groupable` may be true; infinite if that is so of any number."""
        return 0.0

    def together(self, rows: Tensor, expert: Tensor) -> Tensor:
        """All experts at once, without a wait for their numbers of rows: ``rows`` [n, h] sorted by ``expert`` [n]
        → [n, h]."""
        raise NotImplementedError


class Experts(GroupableExperts):
    """The experts' weights, stacked: gate and up [E, f, h], down [E, h, f]; biases [E, f] and [E, h], if any."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        e, h, f = spec.num_experts, spec.hidden_size, spec.intermediate_size
        self.activation = spec.activation
        self.gate_proj = nn.Parameter(torch.empty(e, f, h)) if spec.gated else None
        self.up_proj = nn.Parameter(torch.empty(e, f, h))
        self.down_proj = nn.Parameter(torch.empty(e, h, f))
        gate = spec.gated and spec.moe_bias
        self.gate_bias = nn.Parameter(torch.empty(e, f)) if gate else None
        self.up_bias = nn.Parameter(torch.empty(e, f)) if spec.moe_bias else None
        self.down_bias = nn.Parameter(torch.empty(e, h)) if spec.moe_bias else None
        self.bias_share = 1.0
        """The part of the last biases that is added here: where ranks divide an expert, their outputs are summed."""
        self.linear: Callable[[Tensor, Tensor], Tensor] = F.linear
        """The product of rows and one expert's weight; a technique may replace it by a low-precision one."""

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """``rows`` [n, h] sorted by expert, ``counts[e]`` of them for expert e → [n, h] in the same order."""
        # unbind, not indexing: the backward of one stack is a single copy, that of E indexings fills E full gradients.
        up, down = local(self.up_proj).unbind(), local(self.down_proj).unbind()
        gate = up if self.gate_proj is None else local(self.gate_proj).unbind()
        outputs = []
        for e, part in enumerate(torch.split(rows, counts)):
            if not counts[e]:
                continue
            inner = _plus(self.linear(part, up[e]), self.up_bias, e)
            if self.gate_proj is None:
                inner = ACTIVATIONS[self.activation](inner)
            else:
                inner = gated(self.activation, _plus(self.linear(part, gate[e]), self.gate_bias, e), inner)
            outputs.append(_plus(self.linear(inner, down[e]), self.down_bias, e, self.bias_share))
        if not outputs:  # no rows: gradients of zero nevertheless, because other ranks wait to sum theirs with them
            unused = (
                up[0][0, 0],
                gate[0][0, 0],
                down[0][0, 0],
                *(local(b)[0, 0] for b in (self.gate_bias, self.up_bias, self.down_bias) if b is not None),
            )
            return rows + sum(unused)
        return torch.cat(outputs)

    def together(self, rows: Tensor, expert: Tensor) -> Tensor:
        """See :class:`GroupableExperts`."""
        last = torch.arange(1, len(self.up_proj) + 1, device=rows.device, dtype=expert.dtype)
        offsets = torch.searchsorted(expert, last).to(torch.int32)
        dtype = compute_dtype(rows)

        def product(x: Tensor, weight: Tensor, biases: Tensor | None, share: float = 1.0) -> Tensor:
            y = F.grouped_mm(x.to(dtype), local(weight).to(dtype).transpose(1, 2), offs=offsets)
            return y if biases is None else y + share * local(biases)[expert].to(y.dtype)

        inner = product(rows, self.up_proj, self.up_bias)
        if self.gate_proj is None:
            inner = ACTIVATIONS[self.activation](inner)
        else:
            inner = gated(self.activation, product(rows, self.gate_proj, self.gate_bias), inner)
        return product(inner, self.down_proj, self.down_bias, self.bias_share)

    def groupable(self, rows: Tensor) -> bool:
        """See :class:`GroupableExperts`: 16-bit rows on a GPU."""
        return rows.is_cuda and compute_dtype(rows) in (torch.bfloat16, torch.float16) and self.most_rows() > 0

    def most_rows(self) -> float:
        """See :class:`GroupableExperts`: PyTorch's grouped product takes rows of a multiple of 16 bytes, from compute
        capability 8.0 on."""
        weight = local(self.up_proj)
        plain = self.linear is F.linear and type(weight) in (Tensor, nn.Parameter)
        fits = all(n % 8 == 0 for n in self.up_proj.shape[1:])
        old = weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 0)
        return math.inf if plain and fits and not old else 0.0


def most_tokens_at_once(model: nn.Module) -> float:
    """Tokens of a step up to which the experts of all layers may be computed at once; 0: not in this dtype."""
    layers = [m for m in model.modules() if isinstance(m, MoE) and isinstance(m.experts, GroupableExperts)]
    if any(m.router.weight.dtype not in (torch.bfloat16, torch.float16) for m in layers):
        return 0
    return min((m.experts.most_rows() / m.k for m in layers), default=math.inf)


def _plus(y: Tensor, biases: Tensor | None, expert: int, share: float = 1.0) -> Tensor:
    if biases is None:
        return y
    bias = local(biases)[expert].to(y.dtype)
    return y + (bias if share == 1 else bias * share)


def run_here(experts: Experts, rows: Tensor, counts: list[int]) -> Tensor:
    """The experts on their sorted rows, on this device."""
    out: Tensor = experts(rows, counts)
    return out


class MoE(nn.Module):
    """Router, dispatch of every token to its k experts, and the weighted sum of their outputs, to which that of the
    shared experts is added, if there are any."""

    score_bias: nn.Parameter | None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.num_experts, self.k = spec.num_experts, spec.experts_per_token
        self.capacity = spec.expert_capacity
        self.normalize, self.scale = spec.normalize_router, spec.router_scale or 1.0
        self.sigmoid, self.on_input = spec.router_scores == "sigmoid", spec.router_on_input
        self.groups, self.groups_chosen = spec.router_groups, spec.router_groups_chosen
        self.router = nn.Linear(spec.hidden_size, spec.num_experts, bias=spec.moe_bias)
        bias = nn.Parameter(torch.empty(spec.num_experts), requires_grad=False) if spec.router_score_bias else None
        self.register_parameter("score_bias", bias)
        self.experts = Experts(spec)
        wide = spec.shared_intermediate_size
        self.shared = MLP(spec, wide) if wide else None
        self.run: Callable[[Experts, Tensor, list[int]], Tensor] = run_here
        """Runs the experts on sorted rows: here, or wherever they are held."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` [N, h] → weights [N, k] (float32 or wider) and experts [N, k] of every token, best first."""
        logits = self.router(x)
        wide = torch.promote_types(logits.dtype, torch.float32)
        scores = logits.to(wide).sigmoid() if self.sigmoid else logits.softmax(-1, dtype=wide)
        if self.score_bias is None and self.groups == 1 and not self.sigmoid:
            weights, chosen = scores.topk(self.k, dim=-1)
        elif self.score_bias is None and self.groups == 1:  # large scores round to 1, logits do not
            chosen = logits.detach().topk(self.k, dim=-1).indices
            weights = scores.gather(-1, chosen)
        else:
            chosen = self._ranked(scores.detach()).topk(self.k, dim=-1).indices
            weights = scores.gather(-1, chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights if self.scale == 1 else weights * self.scale), chosen

    def _ranked(self, scores: Tensor) -> Tensor:
        """What experts are chosen by, [N, E]: biased scores, -inf outside of the best groups (arXiv:2405.04434, section
        2.2.2; 2412.19437, section 2.1.2)."""
        bias = self.score_bias
        if bias is not None:
            scores = scores + local(bias).to(scores.dtype)
        if self.groups == self.groups_chosen:
            return scores
        grouped = scores.unflatten(-1, (self.groups, -1))
        best = grouped.amax(-1) if bias is None else grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = best.topk(self.groups_chosen, dim=-1).indices
        out = torch.ones_like(best, dtype=torch.bool).scatter_(-1, kept, False)
        ranked: Tensor = grouped.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(-2)
        return ranked

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., h] → [..., h]."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        if self.capacity is not None and x.dim() == 3 and x.shape[1] > self.capacity:
            weights = self._within_capacity(weights, chosen, x.shape[1], self.capacity)
        pairs = chosen.flatten()  # [N·k]: pair p belongs to token p // k
        order = pairs.argsort(stable=True)
        rows = tokens[order // self.k]
        if self.on_input:
            rows = (rows * weights.flatten()[order].unsqueeze(-1)).to(tokens.dtype)
        if self.run is run_here and isinstance(self.experts, GroupableExperts) and self.experts.groupable(rows):
            rows = self.experts.together(rows, pairs[order])
        else:
            rows = self.run(self.experts, rows, self._counts(pairs))
        # Back to pair order by a gather (each pair exactly once), then a sum over k: unlike a scatter-add onto tokens
        # this is deterministic on every device.
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        mixed = rows[place].view(*weights.shape, -1)
        mixed = mixed if self.on_input else mixed * weights.unsqueeze(-1)
        out: Tensor = mixed.sum(1).to(rows.dtype).view(*x.shape[:-1], -1)
        return out if self.shared is None else out + self.shared(x)

    def _within_capacity(self, weights: Tensor, chosen: Tensor, length: int, most: int) -> Tensor:
        """``weights`` [N, 1] with zeros where a token is not among the first ``most`` of its sequence that chose its
        expert (arXiv:2101.03961, section 2.2)."""
        mine = torch.nn.functional.one_hot(chosen.view(-1, length), self.num_experts)  # [B, S, E]
        place = mine.cumsum(1).gather(2, chosen.view(-1, length, 1))
        return weights * (place <= most).view(-1, 1)

    def _counts(self, pairs: Tensor) -> list[int]:
        """Tokens per expert."""
        if pairs.is_meta:
            # There is no data to count on the meta device, where models are built to count their FLOPs: these depend
            # only on the sum of the counts, so a balanced split gives the exact number.
            share, rest = divmod(pairs.shape[0], self.num_experts)
            return [share + (e < rest) for e in range(self.num_experts)]
        counts: list[int] = pairs.bincount(minlength=self.num_experts).tolist()
        return counts
