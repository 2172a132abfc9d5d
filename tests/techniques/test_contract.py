"""What every technique owes: a complete card, refusals that say why and what would work, a matrix without gaps."""

import json
from copy import deepcopy

import pytest

from ridgeline import experiments
from ridgeline.graph import decode_graph, prefill_graph, training_graph
from ridgeline.predict import predict
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Call
from ridgeline.techniques.cards import card, card_table, cards
from ridgeline.techniques.matrix import judge, pair_experiment, support_matrix
from ridgeline.techniques.registry import check, make, normalize, registry, techniques_of
from ridgeline.techniques.technique import PHASES, Technique

NAMES = list(registry())


def test_first_rows():
    first = {"flash_attention", "recompute", "mixed_precision", "data_parallel", "zero", "lora", "rtn"}
    assert first <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_card_is_complete(name):
    cls = registry()[name]
    c = card(cls)
    assert c["name"] == name == cls.card.name
    for field in ("title", "summary", "paper", "claim", "taxonomy"):
        assert len(c[field]) > 3, field
    assert c["summary"] == " ".join((cls.__doc__ or "").split())
    assert cls.__doc__ != Technique.__doc__
    assert cls.phase in PHASES
    assert c["tasks"]
    assert set(c["tasks"]) <= {"pretrain", "finetune", "compress", "generate", "serve"}
    assert 0 < c["tolerance"] <= 0.12, "the coarsest format, E2M1, rounds normal weights by 11.6 % of their size"
    assert c["lossless"] or c["quality"], "a lossy technique states what it may change"
    assert not c["lossless"] or c["tolerance"] <= 1e-4
    assert set(c["requires"]) <= set(NAMES)
    for option in c["options"]:
        assert option["help"], f"option {option['name']} has no docstring"
        assert option["type"] != "value", f"option {option['name']} has no plain type"
    assert cls.rewrite is not Technique.rewrite
    real = (
        (cls.apply, Technique.apply),
        (cls.build, Technique.build),
        (cls.compress, Technique.compress),
        (cls.serve, Technique.serve),
        (cls.scheduling, Technique.scheduling),
    )
    assert cls.card.runs == any(own is not base for own, base in real)
    assert ("compress" in c["tasks"]) == (cls.compress is not Technique.compress)
    json.dumps(c)
    text = card_table(c)
    assert all(o["name"] in text for o in c["options"])
    assert c["claim"] in text


def test_cards_are_in_phase_order():
    order = [PHASES.index(c["phase"]) for c in cards()]
    assert order == sorted(order)
    assert sorted(c["name"] for c in cards()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_defaults_make_a_technique(name):
    t = make(Call(name=name))
    for option in type(t).model_fields:
        with pytest.raises(ValueError, match="frozen"):
            setattr(t, option, None)
    assert t == make(Call(name=name, options=t.model_dump(mode="json")))


@pytest.mark.parametrize("name", NAMES)
def test_rewrite_changes_only_the_graph(name):
    e = normalize(pair_experiment(name))
    before = e.model_dump_json()
    (t,) = [t for t in check(e) if t.card.name == name]
    graphs = [training_graph(e)] if e.is_training else [prefill_graph(e), decode_graph(e)]
    for g in graphs:
        out = t.rewrite(deepcopy(g), e).close()
        assert out.flops > 0
        assert all(op.flops >= 0 and op.bytes >= 0 for b in out.blocks for op in (*b.forward, *b.backward))
        assert all(b.repeat > 0 for b in out.blocks)
        layers = sum(b.repeat for b in out.blocks if b.name == "layers")
        assert layers == e.model.num_layers
        # Nothing is kept for a backward operator that does not exist.
        for b in out.blocks:
            users = {op.name for op in b.backward} | {"recompute"}
            assert all(s.users & users for s in b.saved.values()), b.saved
    assert e.model_dump_json() == before
    assert predict(e).metrics["tokens_per_s"].value > 0


# ---- refusals -------------------------------------------------------------------------------------------------------


def plan(*calls, on="2xa100", model="llama-tiny", **workload):
    fields = {"kind": "pretrain", "seq_len": 64, "batch_size": 4, **workload}
    if fields["kind"] == "generate":
        fields = {"kind": "generate", **workload}
    return experiments.make(model, on, fields, list(calls))


REFUSED = [
    (lambda: plan("zero", on="a100"), ["only 1 process", "--on 2x"]),
    (lambda: plan("data_parallel", on="a100"), ["only 1 process", "--on 2x"]),
    (lambda: plan("data_parallel", "zero"), ["also decides how data-parallel ranks share the batch", "keep one"]),
    (lambda: plan("rtn"), ["integer base cannot be trained", "--with lora"]),
    (lambda: plan("rtn:bits=4"), ["integer base cannot be trained", "--with lora"]),
    (lambda: plan("lora", "rtn:group_size=7"), ["group_size 7 does not divide", "input width 192", "divisor of 192"]),
    (lambda: plan("recompute:policy=selective", "flash_attention"), ["never stores", "policy=full"]),
    (lambda: plan("recompute:policy=selective,every=2"), ["treats every block alike", "policy=full"]),
    (lambda: plan("recompute:every=5"), ["every=5 exceeds the 4 layers", "at most 4"]),
    (lambda: plan("lora:targets=q_prj"), ["'q_prj' matches no linear layer", "down_proj, gate_proj", "q_proj"]),
    (lambda: plan("lora:targets=gate_proj", model="gpt2-tiny"), ["'gate_proj' matches no linear", "up_proj"]),
    (lambda: plan("lora:targets=up_proj", model="mixtral-tiny"), ["'up_proj' matches no linear", "v_proj"]),
    (lambda: plan("lora:rank=64"), ["rank 64 is not below v_proj's smaller side 64", "below 64"]),
    (lambda: plan("mixed_precision", dtype="bf16"), ["stored in bf16", 'dtype = "fp32"']),
    (lambda: plan("zero", kind="generate"), ["does not apply to task 'generate'", "finetune, pretrain"]),
    (lambda: plan(seq_len=2048), ["2048 tokens is longer than the 1024 positions", "at most 1024"]),
    (lambda: plan(kind="generate", prompt_len=1000, output_len=25), ["1025 tokens is longer than the 1024"]),
    (lambda: plan(batch_size=3), ["batch_size 3 does not split over 2", "multiple of 2"]),
    (lambda: plan(batch_size=6, micro_batch_size=2), ["does not split over 2", "micro_batch_size 2", "multiple of 4"]),
    (lambda: plan(kind="generate", model="bert-tiny"), ["is an encoder", "use a decoder"]),
    (lambda: plan(kind="generate", model="bert-tiny", prompt_len=9999), ["is an encoder", "use a decoder"]),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "says"), REFUSED, ids=[r[1][0] for r in REFUSED])
def test_refusal_gives_reason_and_mend(ask, says):
    with pytest.raises(Incompatible) as caught:
        ask()
    assert caught.value.what
    assert caught.value.fix
    for text in says:
        assert text in str(caught.value)


def test_the_mends_work():
    assert plan("zero", on="2xa100").world == 2
    assert plan("lora", "rtn:group_size=64").plan.has("rtn")
    assert plan("rtn", kind="generate", on="a100").plan.has("rtn")
    assert plan("recompute:every=4").plan.option("recompute", "every") == 4
    assert plan("lora:rank=63").plan.option("lora", "rank") == 63
    assert plan(seq_len=1024).training.seq_len == 1024
    assert plan(batch_size=8, micro_batch_size=2).accumulation == 2


BAD = [
    ("zeroo", ["unknown technique 'zeroo'", "'zero'"]),
    ("flsh", ["unknown technique 'flsh'", "'flash_attention'"]),
    ("zero:stge=3", ["unknown option 'stge' in technique 'zero'", "'stage'"]),
    ("sequence_parallel:block=3", ["'sequence_parallel' has no options", "'block'", "write just sequence_parallel"]),
    ("zero:stage=4", ["stage = 4 is not valid", "1, 2 or 3", "ridgeline techniques zero"]),
    ("lora:rank=0", ["rank = 0 is not valid"]),
    ("lora:rank=two", ["rank = 'two' is not valid"]),
    ("lora:alpha=nan", ["alpha = nan is not valid"]),
    ("lora:targets=", ["at least 1 item"]),
    ("recompute:policy=ful", ["policy = 'ful' is not valid", "'full', 'selective', 'products' or 'budget'"]),
    ("data_parallel:bucket_mb=0", ["bucket_mb = 0 is not valid"]),
]


@pytest.mark.parametrize(("call", "says"), BAD, ids=[b[0] for b in BAD])
def test_unknown_names_and_bad_values(call, says):
    with pytest.raises(UserError) as caught:
        plan(call)
    for text in says:
        assert text in str(caught.value)


# ---- order and normal form ------------------------------------------------------------------------------------------


def test_techniques_apply_in_phase_order_whatever_the_plan_says():
    calls = ["zero", "flash_attention", "mixed_precision", "recompute", "rtn", "lora"]
    for given in (calls, calls[::-1]):
        got = [t.card.name for t in techniques_of(plan(*given).plan)]
        assert got == ["rtn", "lora", "recompute", "flash_attention", "mixed_precision", "zero"]


def test_several_ranks_without_a_plan_are_data_parallel():
    assert plan().plan.has("data_parallel")
    assert not plan("zero").plan.has("data_parallel")
    assert not plan(on="a100").plan.calls
    assert not plan(kind="generate").plan.calls
    again = normalize(plan())
    assert again == normalize(again)


# ---- the support matrix ---------------------------------------------------------------------------------------------


def test_the_matrix_has_every_pair_once():
    pairs = support_matrix()
    assert len(pairs) == len(NAMES) * (len(NAMES) - 1) // 2
    assert len({frozenset((p.a, p.b)) for p in pairs}) == len(pairs)


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_predicted_or_refused_with_reason_and_fix(name):
    """Of ``name`` with every technique after it, in both orders."""
    for other in NAMES[NAMES.index(name) + 1 :]:
        print(f"{name} beside {other}")  # the last one failed
        pair_is_predicted_or_refused(name, other)


def pair_is_predicted_or_refused(a, b):
    pair = judge(a, b)
    assert judge(b, a).status == pair.status
    e: Experiment = normalize(pair_experiment(a, b))
    if pair.status == "refused":
        with pytest.raises(Incompatible) as caught:
            check(e)
        assert caught.value.fix
        assert pair.reason == f"{caught.value.what}; {caught.value.fix}"
        assert len(pair.reason.split()) > 5
        assert a in pair.reason or b in pair.reason
        return
    made = check(e)
    assert {a, b} <= {t.card.name for t in made}
    assert (pair.reason, pair.task, pair.ranks) == ("", e.task, e.world)
    assert pair.plan == e.plan.strings()
    assert predict(e).metrics["tokens_per_s"].value > 0
    stay = [t.card.name for t in made if not t.card.runs or e.task not in (t.card.runs_in or t.card.tasks)]
    assert pair.status == ("predicted" if stay else "works")
