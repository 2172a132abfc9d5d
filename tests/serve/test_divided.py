"""A model on several gloo ranks: the tokens of one process beside every technique that serves, memory that is really
divided, and what each step sends against what is predicted."""

import pytest
import torch
from tests.crossings import crossing
from tests.serve.test_pairs import PROMPTS, SERVES
from tests.serving import ask, collect, run
from tests.world import world

from ridgeline import catalog
from ridgeline.experiments import plan_of
from ridgeline.graph import tokens_graph
from ridgeline.graph.traffic import traffic
from ridgeline.measure.wire import Wire
from ridgeline.predict.common import rewritten
from ridgeline.serve.build_engine import make_engine, make_follower
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.rope import RopeScaling
from ridgeline.spec.workload import Serve
from ridgeline.techniques.matrix import CPU, TINY
from ridgeline.techniques.registry import check, mesh_axes, normalize, techniques_of

TP, EP, PP = "tensor_parallel:degree=2", "expert_parallel:degree=2", "pipeline:degree=2"
MIXTURE = {"num_experts": 4, "experts_per_token": 2}
SERVED = ("paged_kv", "continuous_batching", "chunked_prefill", "padding_free", "flash_attention")
CPU_DEVICE = torch.device("cpu")


def experiment(*plan, model=None, **workload):
    """A small mixture served on as many ranks as the plan takes."""
    calls = Plan.parse(list(plan))
    ranks = 1
    for degree in mesh_axes("serve", techniques_of(calls)).values():
        ranks *= degree
    w = Serve(**{"prompt_len": 8, "output_len": 4, "kv_cache_bytes": 1 << 20, "max_num_batched_tokens": 12, **workload})
    m = TINY.model_copy(update=MIXTURE if model is None else model)
    return normalize(Experiment(model=m, cluster=Cluster(device=CPU, devices_per_node=ranks), workload=w, plan=calls))


def serve(eng):
    """Tokens by request, and log-probabilities."""
    _, events = run(eng, *[ask(str(i), p, 6, logprobs=0) for i, p in enumerate(PROMPTS)])
    told = {str(i): [p.logprob for ev in events if ev.request == str(i) for p in ev.logprobs] for i in range(4)}
    return collect(events), told


def on_ranks(rank, e):
    """(tokens, log-probabilities, its elements, (rows, what was sent) of each step); of other ranks (its elements,)."""
    if rank:
        runner = make_follower(e, CPU_DEVICE)
        runner.follow()
        return (sum(p.numel() for p in runner.model.parameters()),)
    eng = make_engine(e, CPU_DEVICE)
    plain, sent = eng.runner.execute, []

    def counted(step):
        with Wire() as wire:
            out = plain(step)
        assert not wire.unknown
        sent.append((len(step.ids), {key: tuple(v) for key, v in wire.counts.items()}))
        return out

    eng.runner.execute = counted
    tokens, told = serve(eng)
    eng.close()
    return tokens, told, sum(p.numel() for p in eng.model.parameters()), sent


def expected(e, rows):
    """What the graph says that a step of so many rows sends."""
    return traffic(rewritten(tokens_graph(e.model, rows, 1, 1, e.dtype), e, check(e)))


@pytest.mark.parametrize("plan", [(EP,), (TP, EP), (TP,)], ids="+".join)
def test_ranks_serve_hold_and_send_what_is_said(plan):
    e, whole = experiment(*SERVED, *plan), make_engine(experiment(*SERVED), CPU_DEVICE)
    first, second = world(2).run(on_ranks, e)
    tokens, told, held, sent = first
    assert tokens == serve(whole)[0]
    for i, said in serve(whole)[1].items():
        assert told[i] == pytest.approx(said, abs=2e-5)
    g = rewritten(tokens_graph(e.model, 1, 1, 1, e.dtype), e, check(e))
    assert held == second[0] == sum(p.numel * n for p, n in g.params)
    assert held < sum(p.numel() for p in whole.model.parameters())
    assert len(sent) > 4
    for rows, seen in sent:
        assert seen == expected(e, rows)


MULTIPLIERS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6,
               "logits_scaling": 1.5}  # fmt: skip
FAMILIES = {
    "granite": {"family": "granite", **MULTIPLIERS},
    "qwen3_moe": {"family": "qwen3_moe", "qk_norm": True, **MIXTURE},
    "gemma2": {
        "family": "gemma2",
        "sliding_window": 9,
        "window_every": 2,
        "output_norms": True,
        "norm_offset": 1.0,
        "attention_soft_cap": 2.0,
        "logits_soft_cap": 3.0,
    },
    "olmo2": {"family": "olmo2", "input_norms": False, "output_norms": True, "qk_norm": True, "joint_qk_norm": True},
    "gpt_oss": {
        "family": "gpt_oss",
        "attention_sinks": True,
        "moe_bias": True,
        "activation": "swigluoai",
        "sliding_window": 9,
        "window_every": 2,
        **MIXTURE,
    },
    "bloom": {"position": "alibi", "embedding_norm": True},
    "llama4": {
        "family": "llama4_text",
        "sliding_window": 5,
        "chunked_window": True,
        "window_every": 2,
        "nope_layers": True,
        "query_temperature": 0.5,
        "query_temperature_every": 3,
        "qk_norm": True,
        "qk_norm_weight": False,
        "rope_interleaved": True,
        "router_scores": "sigmoid",
        "router_on_input": True,
        "normalize_router": False,
        "shared_intermediate_size": 32,
        **MIXTURE,
    },
    "deepseek_v3": {
        "family": "deepseek_v3",
        "num_kv_heads": TINY.num_heads,
        "head_dim": 12,
        "rotary_dim": 4,
        "rope_interleaved": True,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "value_dim": 8,
        "dense_layers": 1,
        "shared_intermediate_size": 32,
        "router_scores": "sigmoid",
        "router_score_bias": True,
        "router_groups": 2,
        "router_scale": 2.5,
        **MIXTURE,
    },
    "yarn": {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_positions=8, attention_factor=1.2)},
}


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        *((f, p) for f in FAMILIES for p in (TP, PP)),
        ("qwen3_moe", EP),
        ("gpt_oss", EP),
        ("llama4", EP),
        ("deepseek_v3", EP),
    ],
)
def test_two_ranks_serve_every_familys_tokens(family, plan):
    tokens, told, *_ = world(2).run(on_ranks, experiment(*SERVED, plan, model=FAMILIES[family]))[0]
    wanted, said = serve(make_engine(experiment(*SERVED, model=FAMILIES[family]), CPU_DEVICE))
    assert tokens == wanted
    for i, values in said.items():
        assert told[i] == pytest.approx(values, abs=2e-5)


def beside(divided, name, options=None, model=None):
    """The two together, and the technique alone."""
    card = SERVES[name].card
    call = str(Call(name=name, options=options or dict(card.example)))
    model = {**(MIXTURE if divided == EP else {}), **card.needs_model, **(model or {})}
    return experiment(divided, call, model=model), experiment(call, model=model)


def stands(*experiments):
    """Whether nothing refuses them."""
    try:
        for e in experiments:
            check(e)
    except Incompatible:
        return False
    return True


CASES = [(d, n, {}, {}) for d in (EP, TP, PP) for n in SERVES if stands(*beside(d, n))]
CASES += [(TP, "rtn", {}, MIXTURE), (TP, "rtn", {"bits": 4, "group_size": 16}, {})]


@pytest.mark.parametrize("rows", [1, 3, 400])
def test_all_wait_for_the_rank_with_most_experts_to_compute(rows):
    def products(e):
        g = rewritten(tokens_graph(e.model, rows, 1, 1, e.dtype), e, check(e))
        return [op for b in g.blocks for op in b.forward if ".experts." in op.param]

    part, whole = products(experiment(EP)), products(experiment())
    assert part
    for mine, all_ in zip(part, whole, strict=True):
        share = max(1 / 2, 1 / all_.experts)
        assert mine.experts == pytest.approx(max(1, all_.experts / 2))
        assert (mine.flops, mine.bytes) == pytest.approx((share * all_.flops, share * all_.bytes))


@pytest.mark.parametrize(
    ("divided", "name", "options", "model"),
    [pytest.param(*c, marks=[] if c[2] or c[3] else crossing(f"{c[0]}+{c[1]}")) for c in CASES],
)
def test_beside_every_technique_it_serves_the_same(divided, name, options, model):
    e, one = beside(divided, name, options, model)
    try:
        alone = make_engine(one, CPU_DEVICE)
    except Incompatible as refusal:
        pytest.skip(refusal.what)
    tokens, told, *_ = world(2).run(on_ranks, e)[0]
    card = SERVES[name].card
    if card.lossless:
        assert tokens == serve(alone)[0]
    asked = [ask(str(i), [*p, *tokens[str(i), 0]], 1, prompt_logprobs=0) for i, p in enumerate(PROMPTS)]
    for ev in run(alone, *asked)[1]:
        said = [p.logprob for p in ev.prompt_logprobs[-6:]]
        assert told[ev.request] == pytest.approx(said, abs=2e-5 if card.lossless else card.tolerance)


def test_stages_of_ranks_that_share_experts():
    e = experiment(*SERVED, EP, PP)
    assert e.parallel == {"ep": 2, "pp": 2}
    tokens = world(4).run(on_ranks, e)[0][0]
    assert tokens == serve(make_engine(experiment(*SERVED), CPU_DEVICE))[0]


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "bloom", "deepseek_v3"])
def test_ranks_attend_by_score_matrices_too(family):
    """Of their own heads: with soft caps, sinks, slopes and latents."""
    schedule = SERVED[:-1]
    tokens, told, *_ = world(2).run(on_ranks, experiment(*schedule, TP, model=FAMILIES[family]))[0]
    wanted, said = serve(make_engine(experiment(*schedule, model=FAMILIES[family]), CPU_DEVICE))
    assert (tokens, wanted) == (serve(make_engine(experiment(*SERVED, model=FAMILIES[family]), CPU_DEVICE))[0],) * 2
    for i, values in said.items():
        assert told[i] == pytest.approx(values, abs=2e-5)


SYSTEMS = [n for n in catalog.systems() if catalog.system(n).reported.workload.get("kind") == "serve"]


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_serves_a_mixture_with_its_small_plan(name):
    e = experiment(*plan_of([f"{name}:ranks=4"], mixture=True).strings())
    assert e.plan.has("expert_parallel")
    assert not experiment(*plan_of([f"{name}:ranks=4"]).strings()).plan.has("expert_parallel")
    assert world(4).run(on_ranks, e)[0][0] == serve(make_engine(experiment(), CPU_DEVICE))[0]


@pytest.mark.parametrize(
    ("plan", "model", "says", "mend"),
    [((EP,), {}, "has no experts", "mixture"),
     (("expert_parallel:degree=3",), None, "4 experts do not divide over 3 ranks", "divisor of 4"),
     ((TP, "expert_parallel:degree=4"), None, "4 ranks share the experts and 2 all else", "degree=2"),
     (("expert_parallel:degree=2,capacity=1.5",), None, "drop tokens", "leave out capacity"),
     ((EP, "multi_adapter"), None, "adapters are loaded into one process", "merge the adapter")],
    ids=lambda v: v if isinstance(v, str) else None,
)  # fmt: skip
def test_what_cannot_be_served_is_refused(plan, model, says, mend):
    with pytest.raises(Incompatible) as refusal:
        check(experiment(*plan, model=model))
    assert says in refusal.value.what
    assert mend in refusal.value.fix
