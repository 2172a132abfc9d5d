"""Compiled blocks: chains of elementwise operators become single kernels."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, ClassVar, Literal

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.parts import Part
from ridgeline.techniques.registry import refuse
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild

MERGED = {("residual", "norm"), ("rope", "rope")}
"""Kinds of neighboring operators of the graph that become one kernel."""


class TorchCompile(Technique):
    """Compile each block with ``torch.compile`` (regional compilation): one kernel for each chain of elementwise
    operators, forward and backward, and the same code for all blocks of a kind. The first step takes seconds to
    minutes.
    """

    card: ClassVar[Card] = Card(
        name="torch_compile",
        title="Compiled blocks",
        paper="doi:10.1145/3620665.3640366",
        taxonomy="training/model/compiler",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        validated=frozenset({"pretrain"}),
        claim="1.41x faster training of 180 models on an A100 (PyTorch 2, ASPLOS 2024, geometric mean)",
        example={"backend": "aot_eager"},
        changes=frozenset({"compiled_blocks"}),
        conflicts={
            "fused_linears": "compiles the operators that {other} replaces by kernels of its own",
            "fused_norms": "compiles the operators that {other} replaces by kernels of its own",
            "activations": "replaces the operators whose results {other} moves",
            "batch_shape": "compiles for one shape, and {other} changes it",
        },
        unpredicted=dict.fromkeys(("pretrain", "finetune"), "its example only traces the blocks, to be quick"),
    )
    phase: ClassVar[Phase] = "compile"
    order: ClassVar[int] = 9

    backend: Literal["inductor", "aot_eager"] = "inductor"
    """inductor: Triton kernels on a GPU, C++ on a CPU. aot_eager: the traced operators one by one, to see whether a
    fault is the compiler's."""

    pieces: bool = False
    """Compile also what lies between the collectives of blocks of which a rank has shards or parts, as torchtitan does:
    predicted, not yet run."""

    def changes(self) -> frozenset[Part]:
        """Compiled pieces include what recomputation repeats."""
        return self.card.changes | ({"compiled_pieces"} if self.pieces else frozenset())

    @property
    def runs(self) -> bool:
        """Blocks that are whole."""
        return self.card.runs and not self.pieces

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """The compiler; tracing alone saves nothing."""
        return [cls()]

    def unpredicted(self, e: Experiment) -> str:
        """What is only traced takes as long as before."""
        return super().unpredicted(e) if self.backend == "aot_eager" else ""

    def check(self, e: Experiment) -> None:
        """Blocks of which a rank has a part hold collectives, which would cut what is compiled to pieces."""
        if self.pieces:
            return
        refuse(self, e, "weights", "cannot trace how {other} expands the weights that it codes")
        refuse(self, e, "divided_experts", "compiles blocks whose experts are all on one device")
        refuse(self, e, "shards", "compiles blocks whose parameters are whole, and {other} gathers them")
        self.needs(not e.parallel, "compiles blocks that are whole on one device, and others divide them",
                   "leave out what divides the model")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """A residual addition and the norm behind it become one operator, and both rotations."""
        if self.backend == "inductor":
            g.fused = True
            g.each_block(_chain, layers_only=True)
        return g

    def build(self, run: TrainBuild) -> None:
        """Compile the blocks in place. Raises :class:`UserError` on a CPU without a C++ compiler."""
        named = os.environ.get("CXX")
        missing = not any(map(shutil.which, [named] if named else ["g++", "clang++"]))
        if self.backend == "inductor" and run.device.type == "cpu" and missing:
            raise UserError("torch_compile: on a CPU, blocks become C++, and there is no C++ compiler",
                            "install g++, name one in CXX, or leave torch_compile out")  # fmt: skip
        run.model.splits_documents = False  # other lengths would be compiled anew
        for block in run.model.blocks.values():
            block.compile(backend=self.backend, dynamic=False)


def _chain(b: Block) -> None:
    b.forward, b.backward = _chained(b.forward), _chained(b.backward)


_SAME_INPUT = ("k_proj.quantize", "v_proj.quantize", "up_proj.quantize")
"""Conversions of an input that another layer before them has converted."""


def _chained(ops: list[Op]) -> list[Op]:
    """A norm does not read again what an addition before it has written (of three tensors that this moves). What is
    computed twice is computed once, and a sum of three gradients is one kernel."""
    out: list[Op] = []
    summed: set[str] = set()
    for op in ops:
        if op.name.endswith(_SAME_INPUT):
            continue
        if op.name.endswith("_proj.accumulate"):
            part = op.name.partition(".")[0]
            op = changed(op, bytes=op.bytes / 3) if part in summed else op
            summed.add(part)
        last = out[-1] if out else None
        if last is not None and (last.kind, op.kind) in MERGED and last.recompute == op.recompute:
            saved = last.bytes / 3 if last.kind == "residual" else 0.0
            out[-1] = changed(op, flops=op.flops + last.flops, bytes=op.bytes + last.bytes - saved)
        else:
            out.append(op)
    return out
