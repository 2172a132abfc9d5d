"""Products that skip operands that the previous operation left at, or close to, zero.

After a ReLU most inner activations are zero, and after a softmax most probabilities are close to it. What they are
multiplied by (columns of the last projection, rows of the values) need be neither read nor multiplied (NLP-Fast,
doi:10.1109/PACT52795.2021.00013).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.model.attention import AttentionBackend, probabilities
from ridgeline.nn.model.mask import Mask


@dataclass
class Tally:
    """FLOPs of the products that support skipping, and of what was skipped."""

    flops: int = 0
    skipped: int = 0

    def add(self, flops: int, skipped: int) -> None:
        """Count one product."""
        self.flops += flops
        self.skipped += skipped

    @property
    def share(self) -> float:
        """Fraction of the FLOPs that was skipped."""
        return self.skipped / self.flops if self.flops else 0.0


class SkippingLinear(nn.Module):
    """A frozen linear layer that multiplies only inputs above ``threshold`` in magnitude.

    It stores the transposed weight, [in, out], so that the weights of one input are contiguous in memory; each row of
    outputs is then a weighted sum of such rows. |error| of an output is at most ``threshold`` · Σ |w| over what its row
    skipped; at threshold 0 only the order of summation changes.
    """

    def __init__(self, linear: nn.Linear, threshold: float, rows: int, tally: Tally, most: float = 1.0) -> None:
        """``rows``, ``most``: maximum number of rows, and maximum fraction of active inputs, for which skipping pays
        off; above either, all rows use one dense product."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.transposed = nn.Parameter(linear.weight.detach().t().contiguous(), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)
        self.threshold, self.rows, self.tally, self.most = threshold, rows, tally, most

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        flat = x.reshape(-1, self.in_features)
        flops = 2 * flat.shape[0] * self.in_features * self.out_features
        active = None if x.is_meta or flat.shape[0] > self.rows else flat.abs() > self.threshold
        if active is None or int(active.sum()) > self.most * active.numel():
            self.tally.add(flops, 0)
            return F.linear(x, self.transposed.t(), self.bias)
        row, column = active.nonzero(as_tuple=True)
        begins = active.sum(1).cumsum(0).roll(1)
        begins[0] = 0
        self.tally.add(flops, flops - 2 * len(column) * self.out_features)
        values = flat[row, column]
        y = F.embedding_bag(column, self.transposed, begins, mode="sum", per_sample_weights=values)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], -1)


def skipping_attention(threshold: float, block: int, tally: Tally) -> AttentionBackend:
    """Attention that skips blocks of ``block`` keys in which no query of a key/value head has a probability above
    ``threshold``.

    The error of an output is at most ``threshold`` · Σ |v| over the skipped keys. At threshold 0 those are the keys
    that no query attends to: outside its window, in its future, or so unlikely that the softmax gave 0.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        batch, heads, length, width = q.shape
        groups, total = v.shape[1], v.shape[2]
        weights = probabilities(q, k, mask, v.dtype).view(batch, groups, -1, total)
        padded = F.pad(weights.amax(2), (0, -total % block)).view(batch, groups, -1, block)
        keep = (padded.amax(-1) > threshold).repeat_interleave(block, 2)[..., :total]
        rows = weights.shape[2]
        kept = int(keep.sum())
        tally.add(2 * batch * groups * rows * total * width, 2 * rows * width * (batch * groups * total - kept))
        if kept == keep.numel():
            return torch.matmul(weights, v).view(batch, heads, length, width)
        out = torch.empty(batch, groups, rows, width, dtype=v.dtype, device=v.device)
        for b in range(batch):
            for g in range(groups):
                keys = keep[b, g].nonzero()[:, 0]
                torch.matmul(weights[b, g][:, keys], v[b, g][keys], out=out[b, g])
        return out.view(batch, heads, length, width)

    return AttentionBackend("zero_skipping", attend, wants_bias=True)
