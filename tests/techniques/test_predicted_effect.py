"""Every technique changes the prediction of its own example, or its card says why it does not; never both."""

import json

import pytest

from ridgeline import catalog
from ridgeline.predict import predict
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.workload import FineTune, Generate, Pretrain, Serve
from ridgeline.techniques.matrix import TINY, pair_experiment
from ridgeline.techniques.registry import normalize, registry

WIDE = TINY.changed(hidden_size=256, num_heads=4, head_dim=64, intermediate_size=512, max_positions=1024)
"""Large enough for kernels that want sides of 64."""
SERVE = Serve(rate=2000, requests=40, prompt_len=200, output_len=120, length_cv=0.7, max_num_seqs=16,
              max_model_len=1024, max_num_batched_tokens=600, kv_cache_bytes=600_000, engine="ridgeline")  # fmt: skip
"""Long and short prompts in a tight pool and a tight budget, so that every freedom of the scheduler counts."""
FUSED = "flash_attention"
"""Without it no step of ours is captured, whatever else the plan says."""
CASES = [(name, task) for name, cls in registry().items() for task in sorted(cls.card.tasks - {"compress"})]


def examples(name, task):
    """The technique's example as the matrix has it, and on a GPU with a wider model; in ``task``."""
    small = pair_experiment(name)
    if task == "serve":
        small = small.model_copy(update={"workload": SERVE, "model": small.model.changed(max_positions=1024)})
        more = () if name == FUSED else (Call(name=FUSED),)
        needed = {c.name for c in small.plan.calls if task in registry()[c.name].card.tasks}
        calls = (*(c for c in small.plan.calls if c.name in needed), *more)
        small = small.model_copy(update={"plan": Plan(calls=calls)})
    elif task == "generate":
        small = small.model_copy(
            update={
                "workload": Generate(batch_size=2, prompt_len=8, output_len=4),
                "plan": Plan(calls=tuple(c for c in small.plan.calls if c.name == name)),
            }
        )
    else:
        kinds = {"pretrain": Pretrain, "finetune": FineTune}
        fields = pair_experiment(name).workload.model_dump(exclude={"kind"})
        small = small.model_copy(update={"workload": kinds[task](**fields)})
    gpus = Cluster(device=catalog.device("h100-sxm"), devices_per_node=small.cluster.size)
    moe = {k: getattr(small.model, k) for k in ("num_experts", "experts_per_token", "activation", "gated")}
    wide = small.model_copy(update={"cluster": gpus, "model": WIDE.changed(**moe)})
    if task != "serve":
        return [small, wide]
    planned = SERVE.model_copy(update={"engine": "", "kv_cache_bytes": None})
    return [small, wide, wide.model_copy(update={"workload": planned})]


def said(e):
    """Everything that a prediction says, but for its notes and the width of its intervals."""
    try:
        r = predict(normalize(e))
    except Incompatible:
        return None
    parts = (*r.metrics.values(), *r.memory, *r.breakdown, *r.traffic)
    return json.dumps([r.status, *(x.model_dump(exclude={"low", "high"}) for x in parts)])


@pytest.mark.parametrize(("name", "task"), CASES)
def test_a_technique_changes_its_prediction_or_says_why_not(name, task):
    changed = []
    for e in examples(name, task):
        without = e.model_copy(update={"plan": Plan(calls=tuple(c for c in e.plan.calls if c.name != name))})
        pair = [said(e), said(without)]
        if None not in pair:
            changed.append(pair[0] != pair[1])
    assert changed, "no example of it can be predicted"
    assert any(changed) != (task in registry()[name].card.unpredicted)


def test_reasons_are_for_tasks_of_their_own():
    for cls in registry().values():
        assert set(cls.card.unpredicted) <= cls.card.tasks
        assert all(len(why) > 20 for why in cls.card.unpredicted.values())
