"""The technique interface: one frozen class with a card, typed options, ``check``, ``rewrite`` and ``build``.

A technique is one file, ``techniques/FAMILY/NAME.py``. It implements both predictor and engine: ``rewrite`` is a
compiler pass over the analytic graph, ``build`` acts on the real engine's builder, with longer torch code in
``NAME_torch.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator

from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.result import Result
from ridgeline.techniques.parts import Part

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from ridgeline.graph.graph import Graph
    from ridgeline.runtime.build import Build
    from ridgeline.runtime.compress_build import CompressBuild
    from ridgeline.runtime.serve_build import ServeBuild
    from ridgeline.runtime.train_build import TrainBuild
    from ridgeline.spec.model import ModelSpec
    from ridgeline.spec.scheduling import Scheduling

Phase = Literal["adapt", "split", "tensor", "sequence", "recompute", "compile", "shard", "offload", "optimizer", "loop"]
PHASES: tuple[Phase, ...] = (
    "adapt", "split", "tensor", "sequence", "recompute", "compile", "shard", "offload", "optimizer", "loop",
)  # fmt: skip
"""The one order in which techniques apply, whatever their order in the plan: adapters and quantized weights must exist
before anything shards them; a pipeline stage shards only what it keeps; hooks act on final parameters."""


Ask = Callable[[Experiment], Result]
"""The predictor, as techniques see it: metrics and memory of any experiment."""


@dataclass(frozen=True)
class Card:
    """What a technique is, where it comes from, and what it promises."""

    name: str
    title: str
    paper: str
    """arXiv id or other reference."""
    taxonomy: str
    """Position in the field's taxonomy, e.g. ``training/distributed/zero``."""
    tasks: frozenset[str]
    lossless: bool
    """True: same loss or logits as without it, within ``tolerance``."""
    claim: str
    """The paper's own headline result, quoted for comparison with our measurements."""
    tolerance: float = 1e-5
    """Largest relative change of the loss compared with the same plan without the technique (see ``bound``)."""
    bound: Literal["same", "falls"] = "same"
    """``same``: the loss stays within ``tolerance``; ``falls``: other parameters or data are trained, so the loss must
    fall instead."""
    quality: str = ""
    """For a lossy technique: the metric it may change and the bound it is tested to."""
    standard: bool = False
    """For a lossy technique: whether it is standard practice, which a search considers without being asked to."""
    validated: frozenset[str] = frozenset()
    """Tasks in which predictions with it were compared with published measurements."""
    min_ranks: int = 1
    """Minimum number of ranks."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Options that the generic tests and the support matrix use."""
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options that other techniques' examples need when combined with it, by technique name."""
    owns: frozenset[Part] = frozenset()
    """What it alone decides: no other technique of the plan may own or change it (:meth:`Technique.owns`)."""
    changes: frozenset[Part] = frozenset()
    """What else it provides or changes, as others may too (:meth:`Technique.changes`)."""
    needs: Mapping[Part, str] = field(default_factory=dict)
    """What another technique must provide in training, and why."""
    conflicts: Mapping[Part, str] = field(default_factory=dict)
    """What no other technique may own or change, and why; ``{other}`` in a reason is that technique's name."""
    default_in: frozenset[str] = frozenset()
    """Tasks in which it is enabled by default: in training where ranks share the batch and nothing else in the plan
    splits it; in serve, in the plan of ``ridgeline serve``."""
    in_engines: bool = False
    """Whether serving engines do it whatever the plan says, but for those that follow the plan
    (``EngineCosts.flash``)."""
    unpredicted: Mapping[str, str] = field(default_factory=dict)
    """Why the prediction of its example is the same without it, by task; in other tasks it differs (a test checks
    this)."""
    runs: bool = True
    """Whether it is implemented in the engines; False: it can be predicted, not yet run."""
    runs_by: str = ""
    """The command that runs it, where engines do not."""
    runs_in: frozenset[str] | None = None
    """Tasks in which the engines implement it, if not all of ``tasks``."""
    encoder_decoders: bool = False
    """Whether it runs on models with an encoder and a decoder too; others can be predicted with it."""
    needs_model: Mapping[str, Any] = field(default_factory=dict)
    """ModelSpec fields that the generic tests and the support matrix must set for it (a mixture of experts)."""


class Technique(BaseModel):
    """Base class of all techniques. Subclass fields are the options, each with a docstring."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    card: ClassVar[Card]
    phase: ClassVar[Phase]
    order: ClassVar[int] = 0
    """Order within the phase, low first."""
    captured: ClassVar[bool] = True
    """Whether steps with it can be captured as CUDA graphs: the pass reads no data on the host, and launches the same
    in every step of as many tokens."""

    @model_validator(mode="before")
    @classmethod
    def _lone_value(cls, values: Any) -> Any:
        """A list option may be written with a single value, ``targets=q_proj``, or none, ``targets=``."""
        if not isinstance(values, dict):
            return values
        kinds = {k: (f.annotation, *get_args(f.annotation)) for k, f in cls.model_fields.items()}
        lists = {k for k, either in kinds.items() if any(get_origin(a) in (tuple, list) for a in either)}
        one = {k: v for k, v in values.items() if k in lists and isinstance(v, (str, int, float))}
        return {**values, **{k: () if v == "" else (v,) for k, v in one.items()}}

    @property
    def runs(self) -> bool:
        """Whether it can be run with these options."""
        return self.card.runs

    @property
    def own_format(self) -> bool:
        """Whether the compressed checkpoint fits only our own format."""
        return False

    def unproven(self, task: str) -> str:
        """What of it no prediction in ``task`` was compared with published measurements: its name, or an option; empty
        where one was."""
        return "" if task in self.card.validated else self.card.name

    def conflicts(self) -> Mapping[Part, str]:
        """What it cannot be combined with, given these options, and why."""
        return self.card.conflicts

    def owns(self) -> frozenset[Part]:
        """What it alone decides with these options."""
        return self.card.owns

    def changes(self) -> frozenset[Part]:
        """What else it provides or changes with these options."""
        return self.card.changes

    @property
    def parts(self) -> frozenset[Part]:
        """All that it owns or changes."""
        return self.owns() | self.changes()

    @property
    def cache_dtype(self) -> str:
        """Storage format of keys and values that it requires; empty: unchanged."""
        return ""

    def axes(self) -> dict[str, int]:
        """Model-parallel mesh axes that it uses, e.g. ``{"tp": 8}``."""
        return {}

    def serving_axes(self, axes: Collection[str]) -> dict[str, int]:
        """Axes that it uses in task serve, where the techniques of the plan use ``axes`` in training; by default
        :meth:`axes`."""
        return self.axes()

    def inner(self) -> int:
        """Number of data-parallel ranks in an inner group that it forms (ranks that share one sharded copy, or one set
        of experts); 1: none."""
        return 1

    def lazy(self) -> bool:
        """Whether ``build`` works on a model whose parameters are not allocated.

        If this holds for all techniques, parameters are allocated after phase shard, and a rank never holds more than
        its part of them.
        """
        return False

    def copies_every(self) -> int:
        """In training: steps between copies of the state in memory, from which a run goes on when a rank is lost; 0:
        none."""
        return 0

    def layers_per_weights(self) -> int:
        """In training: number of consecutive layers that share one set of weights; 1: each has its own."""
        return 1

    def micro_batches(self, e: Experiment) -> int:
        """In task generate: parts of the batch that pass through the model's layers one after the other."""
        return 1

    def reads_itself(self, e: Experiment) -> tuple[str, ...]:
        """Name prefixes of the dense parameters that it reads from a checkpoint itself: :meth:`apply` finds them on the
        meta device."""
        return ()

    def moves(self, e: Experiment) -> bool:
        """Of what offloads: whether, with these options, anything leaves the device's memory."""
        return True

    def stored(self) -> dict[str, Any]:
        """Options that affect what a checkpoint contains or what the run trains: its optimizer, batches and schedule. A
        run may be resumed with any others changed."""
        trains = self.phase in ("adapt", "optimizer") or (self.phase == "loop" and not self.card.lossless)
        return self.model_dump(mode="json") if trains else {}

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Settings worth trying in a search on ``e``: every combination of its ``Literal`` and ``bool`` options.

        Techniques with degrees or open-ended options override this. It may include settings that ``check`` refuses.
        """
        closed = {k: get_args(f.annotation) for k, f in cls.model_fields.items() if get_origin(f.annotation) is Literal}
        closed |= {k: (False, True) for k, f in cls.model_fields.items() if f.annotation is bool}
        return [cls(**dict(zip(closed, values, strict=True))) for values in product(*closed.values())]

    @classmethod
    def smallest(cls, e: Experiment) -> list[Technique]:
        """Further settings that are worth trying on ``e`` only where the least memory is wanted."""
        return []

    @classmethod
    def saves_memory(cls, e: Experiment) -> str:
        """Its notation in a plan if it would lower the peak of a training step of ``e``; empty if it would not."""
        return ""

    def settled(self, e: Experiment, ask: Ask) -> Technique:
        """Itself with concrete values for the options that are left to the predictor; by default itself.

        Called once per experiment, before ``check``. Raises :class:`Incompatible` when no value is feasible. Before
        that, ``rewrite`` uses an open option's default.
        """
        return self

    def segments(self, e: Experiment) -> list[tuple[float, Experiment]]:
        """(fraction of the steps, the experiment of those steps) if it changes the workload during a run; the last one
        is the workload as written."""
        return [(1.0, e)]

    def unpredicted(self, e: Experiment) -> str:
        """Why ``e`` is predicted as without this technique; empty: it is not."""
        return self.card.unpredicted.get(e.task, "")

    def note(self, e: Experiment, result: Result) -> None:
        """Add notes about the whole run to a predicted Result."""

    def placed(self, e: Experiment) -> Experiment:
        """``e`` with this object replacing the plan's technique of the same name."""
        mine = Call(name=self.card.name, options=self.model_dump(mode="json", exclude_none=True))
        calls = tuple(mine if c.name == self.card.name else c for c in e.plan.calls)
        return e.model_copy(update={"plan": Plan(calls=calls)})

    def resized(self, spec: ModelSpec) -> ModelSpec:
        """The model that results from ``spec``, if it makes it smaller."""
        return spec

    def reads(self) -> tuple[Path, ...]:
        """Files and directories that a run with it reads, beside those of the workload."""
        return ()

    def groups_experts(self, e: Experiment) -> bool:
        """Whether our engine can compute all experts of a layer at once as the technique stores them: alike, and in
        codes that its kernels read (:mod:`ridgeline.nn.model.grouped_experts`)."""
        return True

    def check(self, e: Experiment) -> None:
        """Raise :class:`Incompatible`, with the reason and the fix, if it cannot work in this experiment."""

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Analytic implementation: a pass over the graph. Must not change ``e``; may change and return ``g``."""
        raise NotImplementedError

    def apply(self, run: Build) -> None:
        """Real implementation of changes to the model alone: the same in every engine."""
        raise NotImplementedError

    def build(self, run: TrainBuild) -> None:
        """Real implementation in training: acts on the engine's builder; by default :meth:`apply`."""
        self.apply(run)

    def scheduling(self, s: Scheduling) -> None:
        """What the technique changes about scheduling in task serve, real and simulated."""

    def serve(self, run: ServeBuild) -> None:
        """Real implementation in task serve, in addition to :meth:`scheduling`; by default :meth:`apply`."""
        if type(self).scheduling is Technique.scheduling:
            self.apply(run)

    def compress(self, run: CompressBuild) -> None:
        """Real implementation in task compress: registers with the layer-wise driver."""
        raise NotImplementedError

    def plain(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A model's state as it trains with this technique → the state without it: merged, expanded, renamed.

        For exports and evaluation elsewhere. Called in the order in which techniques are built: a base is expanded
        before the adapters around it are merged into it.
        """
        return state

    def serves(self, out: str) -> tuple[str, ...]:
        """Options with which `ridgeline serve` uses, for the model that was trained, what training has written to
        ``out``, where that is neither a model nor an adapter; empty: it is one of them."""
        return ()

    def needs(self, condition: bool, why: str, fix: str) -> None:
        """Raise :class:`Incompatible` naming this technique unless ``condition`` holds."""
        if not condition:
            raise Incompatible(f"{self.card.name}: {why}", fix)


class SchedulingTechnique(Technique):
    """A technique that only changes how an engine schedules requests or chooses tokens: :meth:`Technique.scheduling`
    tells the real engine and the simulated one. Times of operators with it are those without it."""

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """No change to operators."""
        return g


def nearest_divisor(size: int, degree: int) -> int:
    """The divisor of ``size`` that is closest to ``degree``; of two, the smaller."""
    return min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: (abs(d - degree), d))


def degrees(e: Experiment, most: int, sizes: tuple[int, ...] = ()) -> list[int]:
    """Powers of two from 2 to ``most`` that divide the devices and every one of ``sizes``; where the number of devices
    is none, also these times its odd factor (of six devices 2, 3 and 6)."""
    odd = e.world // (e.world & -e.world)
    found = {part << i for part in (1, odd) for i in range(e.world.bit_length())}
    return [n for n in sorted(found) if 2 <= n <= most and all(size % n == 0 for size in (e.world, *sizes))]
