"""predict(Experiment) → Result: the performance of a plan on hardware that need not be available."""

from __future__ import annotations

from ridgeline.catalog import NoProfile
from ridgeline.graph import training_graph
from ridgeline.predict.common import rank_cluster, rewritten, unknown_host
from ridgeline.predict.known import state
from ridgeline.predict.segments import over_segments, segments
from ridgeline.predict.serving.simulate import done_anyway, predict_serving, prompt_rows
from ridgeline.predict.serving.static_batch import predict_generation
from ridgeline.predict.settle import ask
from ridgeline.predict.step.peak_memory import resting
from ridgeline.predict.step.streams import StreamEvent
from ridgeline.predict.step.training_step import predict_training, timed, update_ops
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.result import Result, Row
from ridgeline.techniques.registry import resolve


def predict(e: Experiment) -> Result:
    """The predicted Result of an experiment. Raises :class:`Incompatible` for an infeasible combination."""
    e, techniques = resolve(e, ask)
    if not e.is_training and e.cluster.device.training_only:
        raise NoProfile(f"the profile of {e.cluster.device.name} has no rates for inference", "run `ridgeline probe`")
    task = predict_training if e.is_training else predict_serving if e.task == "serve" else predict_generation
    result = over_segments([(share, task(part, techniques)) for share, part in segments(e, techniques)])
    if held := result.metrics.get("host_bytes"):
        result.notes += unknown_host(held.value, e.cluster)
    for t in techniques:
        t.note(e, result)
        if why := t.unpredicted(e):
            result.notes.append(f"predicted as without {t.card.name}: {why}")
    state(e, techniques, result)
    return result


def without_effect(e: Experiment) -> list[str]:
    """Techniques of the plan without any one of which all metrics are predicted the same, but for those of which the
    prediction's notes say so anyway."""
    with_all = {name: m.value for name, m in predict(e).metrics.items()}
    resolved, techniques = resolve(e, ask)
    known = {t.card.name for t in techniques if t.unpredicted(resolved)} | {*done_anyway(resolved, techniques)}
    found = []
    for call in e.plan.calls:
        rest = Plan(calls=tuple(c for c in e.plan.calls if c.name != call.name))
        try:
            without = predict(e.model_copy(update={"plan": rest})).metrics
        except UserError:  # another technique needs it
            continue
        if call.name not in known and with_all == {name: m.value for name, m in without.items()}:
            found.append(call.name)
    return found


def serving_prompts(e: Experiment) -> list[Row]:
    """What a mean iteration of a serving engine reads of prompts: rows of phase prefill, beside the breakdown of
    :func:`predict`."""
    e, techniques = resolve(e, ask)
    return prompt_rows(e, techniques)


def predict_trace(e: Experiment) -> list[StreamEvent]:
    """The events of one predicted training step, for a Chrome trace to compare with the measured one."""
    e, techniques = resolve(e, ask)
    g = rewritten(training_graph(e), e, techniques)
    return timed(g, update_ops(g, e), rank_cluster(e), record=True)[0].events


def training_flops(e: Experiment) -> tuple[float, float, str]:
    """Matrix-multiply FLOPs of one step on one rank: (without recomputation, executed, compute dtype)."""
    e, techniques = resolve(e, ask)
    model = executed = 0.0
    dtype = ""
    for share, part in segments(e, techniques):
        g = rewritten(training_graph(part), part, techniques)
        each, dtype = share * g.accumulation / g.stages, g.dtype
        model += g.model_flops * each
        executed += g.flops * g.passes * each
    return model, executed, dtype


def resting_bytes(e: Experiment, place: int | None = None) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer states of a training rank: at one pipeline stage, or the mean."""
    e, techniques = resolve(e, ask)
    return resting(rewritten(training_graph(e), e, techniques), place)
