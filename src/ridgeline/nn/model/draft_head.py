"""A head that drafts a model's next tokens from its last hidden states (EAGLE, arXiv:2401.15077, section 3.1).

What the model's own head reads at a place (the *feature* there) is predicted from the feature before it and the
embedding of the token at the place: a linear layer joins the two, and one decoder layer like the model's follows. The
model's embedding and head serve both. So places of the head's cache are those of the model's: what it keeps at one
depends on the tokens up to it, and on nothing behind.

Shapes: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.model.init import init_weights
from ridgeline.nn.model.loss import IGNORE
from ridgeline.nn.model.transformer import Transformer
from ridgeline.spec.draft_head import head_spec
from ridgeline.spec.model import ModelSpec

_STD = 0.02


class DraftHead(nn.Module):
    """The trained part: the joining layer and the decoder layer. Weights are uninitialized (:meth:`init`)."""

    def __init__(self, spec: ModelSpec) -> None:
        """``spec``: of the model that it drafts for."""
        super().__init__()
        own = head_spec(spec)
        self.fuse = nn.Linear(2 * own.hidden_size, own.hidden_size, bias=True)
        with torch.device("meta"):  # what is cut off is never allocated
            self.body = Transformer(own)
        self.body.embed = self.body.norm = self.body.head = None

    @classmethod
    def empty(cls, spec: ModelSpec, device: torch.device | str, dtype: torch.dtype) -> DraftHead:
        """One with uninitialized memory; on device "meta": shapes only."""
        with torch.device("meta"):
            head = cls(spec)
        return head.to(dtype).to_empty(device=device)

    @torch.no_grad()
    def init(self, seed: int) -> None:
        """Initialize all weights from ``seed``, as a model's (:func:`ridgeline.nn.model.init.init_weights`)."""
        init_weights(self.body, seed)
        full = torch.empty(self.fuse.weight.shape, dtype=torch.float32)
        full.normal_(0, _STD, generator=torch.Generator().manual_seed(seed + 1))
        self.fuse.weight.copy_(full)
        if self.fuse.bias is not None:
            self.fuse.bias.zero_()

    def join(self, embedded: Tensor, before: Tensor) -> Tensor:
        """What the decoder layer reads, [..., H], from the tokens' embeddings and the features before them, [..., H]
        each."""
        joined: Tensor = self.fuse(torch.cat((embedded, before.to(embedded.dtype)), -1))
        return joined

    def forward(
        self, embedded: Tensor, before: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Predicted features [B, S, H] of whole sequences; arguments as in :meth:`join` and
        :meth:`Transformer.forward`."""
        out: Tensor = self.body(self.join(embedded, before), positions, documents=documents)
        return out


def features_before(features: Tensor, documents: Tensor | None = None) -> Tensor:
    """The feature before each place, [B, S, H]: zeros at the beginning of a sequence, and of each of its
    ``documents`` [B, S]."""
    before = F.pad(features[:, :-1], (0, 0, 1, 0))
    if documents is None:
        return before
    begins = documents != F.pad(documents[:, :-1], (1, 0), value=-1)
    return before.masked_fill(begins[..., None], 0)


def draft_loss(
    predicted: Tensor, features: Tensor, head: nn.Module, labels: Tensor, regression: float, classification: float
) -> Tensor:
    """Sum over labeled places of the loss of ``predicted`` features [B, S, H] (fp32 scalar, or wider).

    regression · SmoothL1(f, f̂), a mean over H, + classification · CE(softmax(head(f)), softmax(head(f̂)))
    (arXiv:2401.15077, section 3.2). ``labels`` [B, S]: -100 where there is no loss; their values do not matter, as the
    targets are the model's own. No gradient reaches ``features`` [B, S, H] or the head's weights.
    """
    wide = torch.promote_types(predicted.dtype, torch.float32)
    truth = features.detach()
    with torch.no_grad():
        wanted = head(truth).to(wide).softmax(-1)
    near = F.smooth_l1_loss(predicted.to(wide), truth.to(wide), reduction="none").mean(-1)
    same = -(wanted * head(predicted).to(wide).log_softmax(-1)).sum(-1)
    total: Tensor = ((regression * near + classification * same) * (labels != IGNORE)).sum()
    return total
