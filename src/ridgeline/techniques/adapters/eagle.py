"""EAGLE: train a head that drafts the model's next tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.build_graph import training_graph
from ridgeline.graph.graph import Block, Graph, Op, Param, Saved, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.draft_head import head_spec
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import bringing
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from ridgeline.runtime.train_build import TrainBuild

MEMBER = "draft"
"""The model's member that holds the head while it trains."""


class Eagle(Technique):
    """Freeze the model, and train a head that predicts its last hidden states: one decoder layer over each hidden state
    and the embedding of the token behind it, read by the model's own output layer.

    The loss of a place is regression · SmoothL1 of the hidden state + classification · cross-entropy against the
    model's own distribution there. The paper's uniform noise on hidden states is left out. ``ridgeline finetune``
    writes the head alone, which drafts in task serve.
    """

    card: ClassVar[Card] = Card(
        name="eagle",
        title="EAGLE draft head",
        paper="arXiv:2401.15077",
        taxonomy="inference/decoding/speculative",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="2.7-3.5x lower latency of LLaMA2-Chat 70B, from a head trained in 1-2 days on 4 A100 GPUs",
        bound="falls",
        quality="the model is not changed; the head's own loss must fall below its starting value",
        owns=frozenset({"trainable"}),
        changes=frozenset({"replicas"}),  # it reads the embedding and the output layer beside their own passes
        beside={"swap_advisor": {"budget": "840kB"}},
        conflicts={
            "divided_linears": "{other} divides the model's layers over ranks, and the head reads and uses whole ones",
            "sequence_parts": "{other} divides the sequence, and the head reads the hidden state before each",
        },
    )
    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = 2

    regression: float = Field(default=1.0, ge=0)
    """Weight of the hidden states' smooth L1 loss."""
    classification: float = Field(default=0.1, ge=0)
    """Weight of the cross-entropy against the model's distribution of the next token."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: it trains something other than the model."""
        return []

    def check(self, e: Experiment) -> None:
        """The head reads whole hidden states of a whole model that generates from left to right."""
        try:
            head_spec(e.model)
        except UserError as error:
            self.needs(False, error.what, error.fix or "use a decoder")
        self.needs(self.regression + self.classification > 0,
                   "both parts of its loss have weight 0: nothing is trained",
                   "give regression or classification a weight")  # fmt: skip
        axes = [axis for axis, degree in e.parallel.items() if degree > 1]
        self.needs(not axes, f"the plan divides the model over ranks ({', '.join(axes)}), and the head reads all of it",
                   "divide the batch alone, with data_parallel or zero")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """The model runs forward only; one more layer trains, and the frozen output layer reads it, too."""
        sizes = g.sizes
        if sizes is None or not sizes.training:
            return g
        layer = _draft_layer(e)
        for b in g.blocks:
            for p in b.params:
                p.trainable = False
            b.backward, b.saved, b.backward_workspace = [], {}, 0.0
        last = next(i for i, b in enumerate(g.blocks) if b.is_head)
        _read_twice(g.blocks[last], e, g.tokens)
        g.blocks.insert(last, layer)
        return g

    def build(self, run: TrainBuild) -> None:
        """Put the head beside the model's layers, and minimize its loss in place of the model's."""
        from ridgeline.techniques.adapters.eagle_torch import attach

        attach(run, MEMBER, self.regression, self.classification)

    def plain(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model as it was: the head is no part of it."""
        return {name: t for name, t in state.items() if not name.startswith(f"{MEMBER}.")}

    def serves(self, out: str) -> tuple[str, ...]:
        """Serve the model with drafts from the head."""
        (drafting,) = bringing("drafts")
        return ("--with", f"{drafting}:draft={out}")


def _draft_layer(e: Experiment) -> Block:
    """The head's layer, which reads a product of two tensors as wide as the model."""
    own = head_spec(e.model)
    g = training_graph(e.model_copy(update={"model": own}))
    b = next(b for b in g.blocks if b.is_layer).copy()
    b.name, h, rows, dtype = "layers.draft", own.hidden_size, g.tokens, g.dtype
    w = DTYPE_BYTES[dtype]
    moved = (2 * rows * h + rows * h + 2 * h * h) * w
    fuse = Op("fuse", "draft", "gemm", flops=4.0 * rows * h * h, bytes=moved, dtype=dtype, shape=(rows, h, 2 * h),
              param="fuse.weight")  # fmt: skip
    join = Op("fuse.join", "draft", "copy", bytes=6.0 * rows * h * w, dtype=dtype)  # shift, look up, and concatenate
    dw = changed(fuse, name="fuse.dw", direction="backward", shape=(h, 2 * h, rows), role="weight_gradient")
    db = Op("fuse.db", "draft", "reduce", "backward", 0, rows * h * w, dtype, param="fuse.bias", role="bias_gradient")
    b.forward[:0] = [join, fuse]
    b.backward += [dw, db]
    b.params += [Param("fuse.weight", 2 * h * h, dtype, True, w, shape=(h, 2 * h), grad_bytes=w),
                 Param("fuse.bias", h, dtype, True, w, shape=(h,), grad_bytes=w)]  # fmt: skip
    b.saved["fuse.in"] = Saved(2.0 * rows * h * w, frozenset({"fuse.dw"}))
    return b


def _read_twice(b: Block, e: Experiment, rows: int) -> None:
    """The output layer reads the model's hidden states and the head's; only these have a gradient."""
    h, v, wide = e.model.hidden_size, e.model.vocab_size, 4.0
    out = next(op for op in b.forward if op.name == "head.out")
    cap = [op for op in b.forward if op.name == "head.soft_cap"]
    m, n, k = out.shape
    again = changed(out, name="head.draft")
    b.forward = [op for op in b.forward if op.kind != "loss"]
    b.forward += [again, *(changed(op, name="head.draft.soft_cap") for op in cap)]
    near, logits = float(rows * h), float(rows * v)
    # Two softmaxes, their product and its sum; the difference of hidden states and its mean.
    b.forward.append(Op("loss", "head", "loss", bytes=(8 * logits + 4 * near) * wide, dtype="fp32"))
    back = changed(again, name="head.draft.dx", direction="backward", shape=(m, k, n))
    b.backward = [Op("loss.bwd", "head", "loss", "backward", 0, (6 * logits + 4 * near) * wide, "fp32"), back]
    for op in cap:
        b.backward.append(changed(op, name="head.draft.soft_cap.bwd", direction="backward", bytes=1.5 * op.bytes))
    b.saved = {"loss": Saved((2 * logits + 2 * near) * wide, frozenset({"loss.bwd"}))}
    if cap:
        b.saved["head.draft.capped"] = Saved(logits * wide, frozenset({"head.draft.soft_cap.bwd"}))
    b.workspace = max(b.workspace, logits * wide)
    b.backward_workspace = logits * wide  # two gradients of logits, when the model's own distribution is gone
