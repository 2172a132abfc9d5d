"""Discovers the technique files, turns a Plan's names and options into technique objects, and checks them."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterable
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from ridgeline import techniques as families
from ridgeline.spec.errors import Incompatible, UserError, unknown
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.result import Result
from ridgeline.spec.workload import Generate, Serve
from ridgeline.techniques.parts import PARTS, Part
from ridgeline.techniques.technique import PHASES, Ask, Technique

T = TypeVar("T", bound=Technique)


class _Made(NamedTuple):
    """A technique object and what follows from its options alone."""

    technique: Technique
    parts: frozenset[Part]
    call: Call
    """Its call with every option filled in."""


_cache: dict[tuple[type[Technique], str], _Made] = {}
"""Technique objects by class and options: they are immutable, and one prediction requests each several times."""
_whole: dict[int, _Made] = {}
"""The same by the identity of the calls in them, which normalized plans hold."""
_CACHE_SIZE = 4096


@lru_cache(maxsize=1)
def registry() -> dict[str, type[Technique]]:
    """Every technique by name: the classes with a card in ``FAMILY/NAME.py``; ``NAME_torch.py`` is not imported."""
    found: dict[str, type[Technique]] = {}
    for module in pkgutil.walk_packages(families.__path__, "ridgeline.techniques."):
        if module.ispkg or module.name.endswith("_torch") or module.name.count(".") < 3:
            continue
        loaded = importlib.import_module(module.name)
        for value in vars(loaded).values():
            mine = isinstance(value, type) and issubclass(value, Technique) and value.__module__ == loaded.__name__
            if mine and "card" in vars(value):
                found[value.card.name] = value
    return dict(sorted(found.items()))


def make(call: Call) -> Technique:
    """Create the technique object of one call. Raises :class:`UserError` for an unknown name, option or value."""
    return _made(call).technique


def _made(call: Call) -> _Made:
    same = _whole.get(id(call))
    if same is not None and same.call is call:  # as in every plan that was normalized
        return same
    known = registry()
    if call.name not in known:
        raise unknown("technique", call.name, known, "plan")
    cls = known[call.name]
    key = (cls, repr(call.options))
    found = _cache.get(key)
    if found is None:
        if len(_cache) > _CACHE_SIZE:
            _cache.clear()
            _whole.clear()
        t = _valid(cls, call)
        whole = Call(name=call.name, options=t.model_dump(mode="json", exclude_none=True))
        found = _cache[key] = _whole[id(whole)] = _Made(t, t.parts, whole)
    return found


def _valid(cls: type[Technique], call: Call) -> Technique:
    for key in call.options:
        if key not in cls.model_fields:
            if not cls.model_fields:
                raise UserError(f"technique {call.name!r} has no options, so not {key!r}", f"write just {call.name}")
            raise unknown("option", key, cls.model_fields, f"technique {call.name!r}")
    try:
        return cls(**call.options)
    except ValidationError as e:
        first, *others = e.errors()
        key = ".".join(str(p) for p in first["loc"] if p == first["loc"][0] or isinstance(p, int))
        alike = [first, *(o for o in others if o["loc"][0] == first["loc"][0])]  # one for each type that it may have
        wrong = ", or ".join(dict.fromkeys(str(o["msg"]) for o in alike))
        raise UserError(
            f"technique {call.name!r}: {key} = {first.get('input')!r} is not valid: {wrong}",
            f"see `ridgeline techniques {call.name}`",
        ) from None


def techniques_of(plan: Plan) -> list[Technique]:
    """The plan's technique objects in canonical (phase) order."""
    return in_order([make(call) for call in plan.calls])


def in_order(techniques: list[Technique]) -> list[Technique]:
    """Techniques in the canonical order in which they apply."""
    return sorted(techniques, key=_place)


def _place(t: Technique) -> tuple[int, int, str]:
    return PHASES.index(t.phase), t.order, t.card.name


def brief(plan: Plan) -> list[str]:
    """The calls in ``name:option=value`` form without options at their defaults, and without degrees and stages."""
    return [str(Call(name=t.card.name, options=_brief_options(t))) for t in techniques_of(plan)]


def _brief_options(t: Technique) -> dict[str, Any]:
    changed = t.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    degrees = {k: v for k, v in t.model_dump(mode="json", exclude_none=True).items() if k in ("degree", "stage")}
    return degrees | changed


def remaining_model(e: Experiment) -> ModelSpec:
    """The model that remains where the plan makes it smaller."""
    spec = e.model
    for t in techniques_of(e.plan):
        spec = t.resized(spec)
    return spec


def having(e: Experiment, part: Part) -> list[Technique]:
    """The techniques of the plan that own or change ``part``."""
    return [made.technique for made in map(_made, e.plan.calls) if part in made.parts]


def has(e: Experiment, part: Part) -> bool:
    """Whether a technique of the plan owns or changes ``part``."""
    return any(part in _made(call).parts for call in e.plan.calls)


def copies_every(plan: Plan) -> int:
    """Steps between copies of a training run's state in memory; 0: there are none."""
    return max((t.copies_every() for t in techniques_of(plan)), default=0)


def of_kind(e: Experiment, kind: type[T]) -> T | None:
    """The plan's technique of class ``kind``, for code that reads its options."""
    return next((t for t in map(make, e.plan.calls) if type(t) is kind), None)


def refuse(t: Technique, e: Experiment, part: Part, why: str, fix: str = "keep one of {name} and {other}") -> None:
    """Raise :class:`Incompatible` when another technique of the plan owns or changes ``part``; in ``why`` and ``fix``,
    ``{other}`` is its name and ``{name}`` that of ``t``."""
    for other in having(e, part):
        names = {"name": t.card.name, "other": other.card.name}
        t.needs(names["other"] == names["name"], why.format(**names), fix.format(**names))


def bringing(part: Part) -> tuple[str, ...]:
    """Names of the techniques whose cards own or change ``part``."""
    return tuple(name for name, cls in registry().items() if part in cls.card.owns | cls.card.changes)


def default_plan(task: str) -> tuple[str, ...]:
    """Names of the techniques that a task enables by default (:attr:`Card.default_in`)."""
    return tuple(name for name, cls in registry().items() if task in cls.card.default_in)


def as_in_engines(techniques: Iterable[Technique]) -> list[Technique]:
    """The techniques of a serving engine: with those that every engine has, at their defaults."""
    always = [cls() for cls in registry().values() if cls.card.in_engines]
    return in_order([*(t for t in techniques if not t.card.in_engines), *always])


def partners(t: Technique) -> tuple[str, ...]:
    """For each part that ``t`` needs in training, the first technique that provides it and is compatible with ``t``."""
    found = []
    for part in t.card.needs:
        known = (make(Call(name=name, options=dict(cls.card.example))) for name, cls in registry().items())
        found.append(next(p.card.name for p in known if part in p.parts and not (t.owns() & p.owns())))
    return tuple(found)


def mesh_axes(task: str, techniques: Iterable[Technique]) -> dict[str, int]:
    """The combined model-parallel axes of the techniques in a task, and their degrees."""
    techniques = list(techniques)
    axes: dict[str, int] = {}
    for t in techniques:
        axes.update(t.axes())
    if task != "serve":
        return axes
    taken = frozenset(axes)
    axes = {}
    for t in techniques:
        axes.update(t.serving_axes(taken))
    return axes


def normalize(e: Experiment) -> Experiment:
    """The same experiment with every option filled in and the mesh resolved.

    Several ranks in training with no technique that splits the batch default to plain data parallelism, PyTorch's
    convention.
    """
    made = sorted(map(_made, e.plan.calls), key=lambda m: _place(m.technique))
    axes = mesh_axes(e.task, [m.technique for m in made])
    split = e if e.parallel == axes else e.model_copy(update={"parallel": axes})
    if e.is_training and split.gradient_ranks > 1 and not any("batch_split" in m.parts for m in made):
        made += [_made(Call(name=name)) for name in default_plan(e.task)]
        made.sort(key=lambda m: _place(m.technique))
    calls = tuple(m.call for m in made)
    if e.plan.calls == calls and e.parallel == axes:
        return e
    return e.model_copy(update={"plan": Plan(calls=calls), "parallel": axes})


def resolve(e: Experiment, ask: Ask | None = None) -> tuple[Experiment, list[Technique]]:
    """The normalized experiment in which every technique has resolved the options left open, and its techniques in
    canonical order, checked. Resolving again changes nothing.

    Techniques are resolved in canonical order, so that each sees what those before it chose; one that is still open is
    predicted with its defaults. ``ask`` is the predictor; an engine has none, and takes resolved experiments. Raises
    :class:`Incompatible` if no choice is feasible, and for an open choice without a predictor.
    """
    given = e = normalize(e)
    techniques = techniques_of(e.plan)
    for t in techniques:
        chosen = t.settled(e, ask or _unsettled)
        if chosen is not t:
            e = chosen.placed(e)
    if e is not given:
        techniques = techniques_of(e.plan)
    check_places(e)
    check_techniques(e, techniques)
    return e, techniques


def _unsettled(e: Experiment) -> Result:
    raise Incompatible(
        "the plan leaves a choice to the predictor", "make the experiment with ridgeline.experiments, which settles it"
    )


def check(e: Experiment) -> list[Technique]:
    """Check a normalized experiment; returns its techniques in canonical order.

    Raises :class:`Incompatible` with the reason and the fix.
    """
    techniques = techniques_of(e.plan)
    check_places(e)
    check_techniques(e, techniques)
    return techniques


def check_techniques(e: Experiment, techniques: list[Technique]) -> None:
    """:func:`check` for existing technique objects."""
    check_workload(e)
    for t in techniques:
        if e.task not in t.card.tasks:
            tasks = ", ".join(sorted(t.card.tasks))
            raise Incompatible(
                f"{t.card.name} does not apply to task {e.task!r}", f"it works in: {tasks}; remove it from the plan"
            )
    having = _by_part(techniques)
    _check_needs(e, techniques, having)
    _check_apart(techniques, having)
    for t in techniques:
        t.check(e)


def _by_part(techniques: list[Technique]) -> dict[Part, list[Technique]]:
    found: dict[Part, list[Technique]] = {}
    for t in techniques:
        for part in t.parts:
            found.setdefault(part, []).append(t)
    return found


def _check_needs(e: Experiment, techniques: list[Technique], having: dict[Part, list[Technique]]) -> None:
    """Check that the plan provides what each technique needs in training."""
    for t in techniques if e.is_training else ():
        for part, why in t.card.needs.items():
            if all(other is t for other in having.get(part, ())):
                missing = dict(zip(t.card.needs, partners(t), strict=True))[part]
                raise Incompatible(f"{t.card.name}: {why}", f"add {missing} (--with {missing})")


def check_apart(techniques: list[Technique]) -> None:
    """Raise :class:`Incompatible` where a technique owns, or is incompatible with, what another one owns or changes: no
    additional technique can resolve that."""
    _check_apart(techniques, _by_part(techniques))


def _check_apart(techniques: list[Technique], having: dict[Part, list[Technique]]) -> None:
    for t in techniques:
        name, conflicts, owned = t.card.name, t.conflicts(), t.owns()
        for part in (*conflicts, *sorted(owned.difference(conflicts))):
            for other in having.get(part, ()):
                if other is not t:
                    why = f"{{other}} also decides {PARTS[part]}" if part in owned else conflicts[part]
                    raise Incompatible(f"{name}: {why.format(other=other.card.name)}",
                                       f"keep one of {name} and {other.card.name}")  # fmt: skip


def require_sides(e: Experiment) -> None:
    """Raise :class:`Incompatible` when a technique of the plan does not run on the encoder of an encoder-decoder."""
    for t in techniques_of(e.plan):
        if e.model.is_encoder_decoder and not t.card.encoder_decoders:
            others = ", ".join(sorted(cls.card.name for cls in registry().values() if cls.card.encoder_decoders))
            raise Incompatible(f"{t.card.name} runs on decoders; {e.model.name} has an encoder too: it can be"
                               " predicted, not run", f"techniques that run on it: {others}")  # fmt: skip


def require_runnable(e: Experiment) -> None:
    """Raise :class:`Incompatible` when a technique of the plan can be predicted but not run."""
    require_sides(e)
    for t in techniques_of(e.plan):
        here = t.card.runs_in is None or e.task in t.card.runs_in
        if not (t.runs and here):
            where = " with these options" if t.card.runs and here else "" if here else f" in task {e.task!r}"
            own = t.card.runs_by
            raise Incompatible(
                f"{t.card.name} can be predicted{where}, not {'run as part of a plan' if own else 'yet run'}",
                f"use {f'`{own}`, ' if own else ''}`ridgeline predict`, or remove it from the plan",
            )


def _nearest_degrees(axes: dict[str, int], world: int) -> str:
    """The degrees closest to ``axes`` (by ratio, then the fewest changes) whose product divides ``world``."""
    divisors = [d for d in range(1, world + 1) if world % d == 0]

    def distance(degrees: tuple[int, ...]) -> tuple[float, int]:
        pairs = list(zip(degrees, axes.values(), strict=True))
        return sum(abs(math.log(d / wanted)) for d, wanted in pairs), sum(d != wanted for d, wanted in pairs)

    near = [{1, *sorted(divisors, key=lambda d: abs(math.log(d / wanted)))[:6]} for wanted in axes.values()]
    best = min((d for d in product(*near) if world % math.prod(d) == 0), key=distance)
    return " × ".join(f"{axis} {degree}" for axis, degree in zip(axes, best, strict=True))


def _check_sides(e: Experiment) -> None:
    """What is not done with an encoder and a decoder."""
    m, w = e.model, e.workload
    if isinstance(w, Serve) or (isinstance(w, Generate) and w.engine):
        raise Incompatible(
            f"{m.name} has an encoder and a decoder: the serving engines here batch decoders only",
            "use a decoder, `ridgeline generate`, or task generate without an engine",
        )
    if e.task == "compress":
        raise Incompatible(f"{m.name} has an encoder and a decoder: compression here walks through decoders",
                           "use a decoder")  # fmt: skip
    if e.is_training and e.training.separates_documents:
        raise Incompatible(f"{m.name} has an encoder and a decoder: its examples are pairs, one in a row, which are not"
                           " packed", "leave document_mask out, or give packing=false (--no-packing)")  # fmt: skip


def check_places(e: Experiment) -> None:
    """Unequal devices train as stages of one pipeline, each in one part of the cluster. A plan may be incomplete for
    :func:`check_techniques`, and so without its pipeline; not for this."""
    label, sizes = e.cluster.label, [part.size for part in e.cluster.parts]
    if sizes and not e.is_training:
        raise Incompatible(f"{label} has unequal devices, which only train together", "name one of its parts")
    each = e.world // e.parallel.get("pp", 1)
    if any(size % each for size in sizes):
        raise Incompatible(
            f"stages of {each} devices do not lie in parts of {' and '.join(map(str, sizes))}, whose devices differ",
            f"use pipeline:degree={e.world // math.gcd(*sizes)} or a multiple, or let `ridgeline plan` choose",
        )


def check_workload(e: Experiment) -> None:
    """Raise :class:`Incompatible` where the workload does not suit the model, or does not divide over the ranks."""
    m, w = e.model, e.workload
    degree = math.prod(e.parallel.values())
    if e.world % degree:
        axes = " × ".join(f"{k} {v}" for k, v in e.parallel.items())
        raise Incompatible(
            f"{e.world} devices do not split into groups of {degree} ({axes})",
            f"use {_nearest_degrees(e.parallel, e.world)}, or a multiple of {degree} devices",
        )
    if e.is_training and m.head in ("classify", "project"):
        what = "is a classifier" if m.head == "classify" else "makes vectors of tokens"
        raise Incompatible(f"{m.name} {what}, and training here predicts tokens",
                           "train a language model, or use this one with serve")  # fmt: skip
    if e.task in ("compress", "generate") and not m.causal:
        raise Incompatible(f"{m.name} is an encoder: it cannot generate", "use a decoder, or task pretrain/finetune")
    if m.is_encoder_decoder:
        _check_sides(e)
    length = max(getattr(w, "seq_len", 0), getattr(w, "prompt_len", 0) + getattr(w, "output_len", 0))
    if m.position not in ("relative", "alibi") and length > m.max_positions:
        raise Incompatible(
            f"sequence of {length} tokens is longer than the {m.max_positions} positions of {m.name}",
            f"use at most {m.max_positions} tokens, or a model with more positions",
        )
    if e.is_training:
        share = e.data_parallel * e.micro_batch_size
        if e.batch_size % share:
            raise Incompatible(
                f"batch_size {e.batch_size} does not split over {e.data_parallel} data-parallel ranks"
                f" × micro_batch_size {e.micro_batch_size}",
                f"use a multiple of {share}" if e.training.micro_batch_size else f"use a multiple of {e.data_parallel}",
            )
