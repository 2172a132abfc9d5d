"""Pipeline parallelism: consecutive layers on consecutive ranks, micro-batches streaming through."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Graph, Op, Pipeline, even
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.technique import Ask, Card, Phase, Technique, degrees

if TYPE_CHECKING:
    from ridgeline.runtime.serve_build import ServeBuild
    from ridgeline.runtime.train_build import TrainBuild
    from ridgeline.spec.scheduling import Scheduling


class PipelineParallel(Technique):
    """Divide the layers into stages; the schedule decides the order of forward and backward passes on each.

    gpipe runs all forwards, then all backwards; 1f1b alternates them, so that a stage holds at most as many
    micro-batches as there are stages after it; interleaved gives each rank several smaller stages (arXiv:2104.04473,
    section 2.2); zero_bubble delays weight gradients into the idle gaps (arXiv:2401.10241, ZB-H1).
    """

    card: ClassVar[Card] = Card(
        name="pipeline",
        title="Pipeline parallelism",
        paper="arXiv:1811.06965",
        taxonomy="training/distributed/pipeline",
        tasks=frozenset({"pretrain", "finetune", "serve"}),
        lossless=True,
        validated=frozenset({"pretrain", "finetune"}),
        claim="almost linear speed-up with the number of stages when micro-batches are many times as many",
        min_ranks=2,
        example={"degree": 2},
        changes=frozenset({"stages", "whole_gradients"}),
    )
    phase: ClassVar[Phase] = "split"
    captured: ClassVar[bool] = False

    degree: int = Field(default=2, ge=2)
    """Number of stages, one per rank."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of the forward and backward passes."""
    chunks: int = Field(default=1, ge=1)
    """Stages per rank (schedule interleaved)."""
    balance: Literal["even", "auto"] = "even"
    """even: the same number of layers in every stage; auto: the first and last stages, which also hold the embedding
    and the head, take fewer if the predictor finds that faster, or if the plan does not fit otherwise."""
    layers: tuple[int, ...] | None = None
    """Number of layers of every stage, in order; None: determined by ``balance``."""
    overlap: bool = True
    """Whether transfers between stages run beside computation; Megatron-LM of 2021 waits for each: predicted, not yet
    run."""
    outputs: Literal["freed", "kept"] = "freed"
    """Whether a stage's outputs, logits among them, are kept until the step ends, beside a buffer for what each
    micro-batch receives, as by PyTorch's own stages: predicted, not yet run."""

    def unproven(self, task: str) -> str:
        """Published runs are of 1F1B and interleaved schedules, and the figure of GPipe's own paper."""
        rare = "pipeline:schedule=zero_bubble" if self.schedule == "zero_bubble" else ""
        return super().unproven(task) or rare

    def axes(self) -> dict[str, int]:
        """The outermost mesh axis."""
        return {"pp": self.degree}

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Powers of two (on unequal devices: as many stages as lie in one part of the cluster each), in training with
        1f1b, zero_bubble, and two or four chunks where there are enough layers.

        gpipe has the same bubble as 1f1b and needs more memory, so it is never worth trying.
        """
        layers = e.model.num_layers + e.model.encoder_layers
        out: list[Technique] = []
        for n in _degrees(e, layers):
            out.append(cls(degree=n, schedule="1f1b"))
            if not e.is_training:
                continue
            out.append(cls(degree=n, schedule="zero_bubble"))
            out += [cls(degree=n, schedule="interleaved", chunks=c) for c in (2, 4) if n * c <= layers]
        return out

    def settled(self, e: Experiment, ask: Ask) -> Technique:
        """Number of layers of the last stage and of the first, the rest divided evenly: the fastest predicted step (or,
        where none fits, the smallest peak). Fewer layers are tried as long as that helps."""
        stages = self.degree * self.chunks
        total = e.model.num_layers + e.model.encoder_layers
        if self.balance == "even" or self.layers is not None or total < stages or not e.is_training:
            return self

        def cut(first: int, last: int) -> PipelineParallel:
            inner = even(total - first - last, stages - 2) if stages > 2 else []
            return self.model_copy(update={"layers": (first, *inner, last)})

        def score(first: int, last: int) -> tuple[bool, float]:
            found = ask(cut(first, last).placed(e))
            worth = found.metrics["step_time_s"].value if found.status == "ok" else sum(m.bytes for m in found.memory)
            return found.status != "ok", worth

        if stages == 2:  # the layers that this stage does not take go to the other
            return cut(*min(((n, total - n) for n in range(1, total)), key=lambda pair: score(*pair)))
        best: tuple[tuple[bool, float], int, int] | None = None
        worse = 0
        for last in range(-(-total // stages), 0, -1):
            tried = []
            for first in range(max(even(total - last, stages - 1)), 0, -1):
                if total - first - last < stages - 2:
                    continue
                tried.append((score(first, last), first, last))
                if len(tried) > 1 and tried[-1][0] >= tried[-2][0]:
                    break
            if tried and (best is None or min(tried) < best):
                best, worse = min(tried), 0
            else:
                worse += 1
            if worse == 2:
                break
        assert best is not None
        return cut(best[1], best[2])

    def lazy(self) -> bool:
        """True: it needs only shapes."""
        return True

    def check(self, e: Experiment) -> None:
        """There must be enough layers for all stages; chunks require the interleaved schedule."""
        stages = self.degree * self.chunks
        layers = e.model.num_layers + e.model.encoder_layers
        self.needs(layers >= stages, f"{layers} layers do not fill {stages} stages", f"use at most {layers} stages")
        if self.layers is not None:
            counts = " + ".join(str(n) for n in self.layers)
            self.needs(
                len(self.layers) == stages and sum(self.layers) == layers and min(self.layers) > 0,
                f"layers {counts} are not {layers} layers in {stages} stages",
                f"give {stages} numbers that add up to {layers}, or drop layers",
            )
        if self.schedule == "interleaved":
            self.needs(self.chunks > 1, "schedule interleaved with one chunk is 1f1b", "set chunks=2, or use 1f1b")
            self.needs(
                e.accumulation % self.degree == 0,
                f"schedule interleaved needs micro-batches ({e.accumulation}) in groups of its {self.degree} stages",
                f"use a batch_size that gives a multiple of {self.degree} micro-batches, or schedule=1f1b",
            )
        else:
            self.needs(self.chunks == 1, f"schedule {self.schedule} has one stage a rank, not {self.chunks} chunks",
                       "use schedule=interleaved, or drop chunks")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Set the step's stages; a tied head has its own copy of the embedding on the last stage."""
        if not e.is_training:
            return self._in_turn(g, e)
        pipe = Pipeline(self.degree, self.schedule, self.chunks, self.layers or (), waits=not self.overlap,
                        keeps_outputs=self.outputs == "kept")  # fmt: skip
        g.pipeline = pipe

        def connect(graph: Graph) -> None:
            send = Op("send", "communication", "p2p", bytes=graph.residual, link_bytes=graph.residual, ranks=2,
                      axis="pp", stride=e.stride("pp"))  # fmt: skip
            graph.pipeline = replace(pipe, send=send)

        g.closing.append(connect)
        if e.model.tie_embeddings:
            table = next(p for p in g.blocks[0].params if p.name == "embed.tokens.weight")
            g.blocks[-1].params.append(replace(table))
            g.closing.append(lambda graph: _sum_tied(graph, self.degree, e.stride("pp")))
        return g

    def _in_turn(self, g: Graph, e: Experiment) -> Graph:
        """A serving step passes through the stages one after another and back to the first: each device holds part of
        the layers and of the cache, and the time is that of all stages plus the transfers between them."""
        g.kv_cache /= self.degree
        for b in g.blocks:
            if b.name == "layers":
                for p in b.params:
                    p.numel /= self.degree
        size = g.tokens * e.model.hidden_size * DTYPE_BYTES[g.dtype]
        sends = [Op(f"send{i}", "communication", "p2p", bytes=size, link_bytes=size, ranks=2, axis="pp",
                    stride=e.stride("pp")) for i in range(self.degree)]  # fmt: skip
        head = next(b for b in g.blocks if b.is_head)
        head.forward[:0] = sends
        return g

    def scheduling(self, s: Scheduling) -> None:
        """A rank's cache holds only its own layers."""
        s.stages = self.layers or ()

    def serve(self, run: ServeBuild) -> None:
        """Keep this rank's layers; embedding, final norm and head stay on the first stage. A step passes through the
        stages one after another."""
        from torch import nn

        assert run.mesh is not None
        model, at = run.model, run.mesh.at("pp")
        counts = self.layers or even(run.experiment.model.num_layers, self.degree)
        first = sum(counts[:at])
        names = list(model.layers)[first : first + counts[at]]
        model.layers = nn.ModuleDict({n: model.layers[n] for n in names})
        if at:
            model.embed = model.norm = model.head = None

    def build(self, run: TrainBuild) -> None:
        """Keep this rank's stages; PyTorch's runtime executes the schedule's action list."""
        from ridgeline.techniques.parallel.pipeline_torch import PipelineRuntime

        self.needs(self.overlap, "overlap=false can be predicted, not yet run", "drop it")
        self.needs(self.outputs == "freed", "outputs=kept can be predicted, not yet run", "drop it")

        total = run.experiment.model.num_layers
        counts = self.layers or even(total, self.degree * self.chunks)
        ends = list(accumulate(counts))
        parts = [list(range(end - n, end)) for n, end in zip(counts, ends, strict=True)]
        PipelineRuntime(run, self.schedule, parts, self.chunks)


def _degrees(e: Experiment, layers: int) -> list[int]:
    if not e.cluster.parts:
        return degrees(e, layers)
    most = math.gcd(*(part.size for part in e.cluster.parts))
    return [e.world // each for each in range(most, 0, -1) if most % each == 0 and e.world // each <= layers]


def _sum_tied(g: Graph, degree: int, stride: int) -> None:
    """The first and the last stage sum the gradients of their copies of the embedding, after all other reductions."""
    for b in (g.blocks[0], g.blocks[-1]):
        table = next(p for p in b.params if p.name == "embed.tokens.weight")
        size = table.numel / table.state_shards * 4.0
        b.reduce.append(Op("tied.reduce", "communication", "all_reduce", "backward", bytes=size, link_bytes=size,
                           ranks=2, axis="pp", stride=stride * (degree - 1)))  # fmt: skip
