"""Whatever is asked, valid or not: a Result of finite numbers that are not negative, or one message."""

import math
from typing import Literal, get_args, get_origin

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline import experiments
from ridgeline.predict import predict
from ridgeline.spec.errors import UserError
from ridgeline.spec.plan import Call
from ridgeline.techniques.registry import make, partners, registry

MODELS = ("llama2-7b", "llama2-70b", "mixtral-8x7b", "gpt3-175b", "gpt2", "opt-1.3b", "bert-large", "switch-base-8",
          "t5-large", "qwen3-235b-a22b", "gpt-oss-120b", "llama-tiny")  # fmt: skip
DEVICES = ("a100-80g-sxm", "h100-sxm", "b200", "rtx3090", "rtx4090", "t4", "mi300x", "v100-32g-sxm")
COUNTS = st.sampled_from([1, 2, 3, 4, 8, 8, 16, 64])
LENGTHS = st.sampled_from([1, 2, 7, 31, 128, 128, 1000, 1000])
FEW = st.sampled_from([1, 2, 3, 8, 64])
COUNTED, SHARES = [1, 2, 3, 4, 7, 8, 32, 64, 128], [0.01, 0.3, 0.5, 0.99, 1.5, 20.0]
WRONG = [-1, 0, 0.5, True, "x", [3], 10**9]


@st.composite
def made_up(draw):
    """A model of sizes that nobody would choose: narrow, odd, with more experts than rows."""
    kv, per = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 3, 8]))
    experts = draw(st.sampled_from([0, 0, 1, 4, 128]))
    return {
        "family": "llama", "vocab_size": draw(st.sampled_from([2, 1000, 32000])), "num_layers": draw(FEW),
        "hidden_size": draw(st.sampled_from([1, 8, 64, 4096])), "num_heads": kv * per, "num_kv_heads": kv,
        "head_dim": draw(st.sampled_from([1, 3, 64])), "intermediate_size": draw(st.sampled_from([1, 24, 64, 11008])),
        "max_positions": draw(st.sampled_from([16, 8192, 8192, 8192])),
        "norm": "rmsnorm", "activation": "silu", "position": "rope",
        "num_experts": experts, "experts_per_token": min(experts, draw(FEW)),
        "moe_every": draw(st.sampled_from([1, 2])), "tie_embeddings": draw(st.booleans()),
    }  # fmt: skip


WORKLOADS = st.one_of(
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["pretrain", "finetune"]), "seq_len": LENGTHS,
         "optimizer": st.sampled_from(["adamw", "sgd"])},
        optional={"batch_size": FEW, "micro_batch_size": FEW, "grad_clip": st.just(0.0)},
    ),
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["generate", "compress"]), "prompt_len": LENGTHS, "output_len": LENGTHS,
         "batch_size": FEW},
        optional={"engine": st.sampled_from(["vllm", "vllm-2023", "trtllm"]),
                  "dtype": st.sampled_from(["fp32", "fp16"])},
    ),
    st.fixed_dictionaries(
        {"kind": st.just("serve"), "prompt_len": LENGTHS, "output_len": LENGTHS, "requests": FEW},
        optional={"engine": st.sampled_from(["vllm", "trtllm", "ridgeline"]), "concurrency": FEW,
                  "length_cv": st.just(0.5), "max_num_seqs": FEW, "max_num_batched_tokens": LENGTHS},
    ),
)  # fmt: skip


def values(annotation):
    """Values of an option's type, and now and then another."""
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    kinds = get_args(annotation) or (annotation,)
    of = [True, False] if bool in kinds else COUNTED if int in kinds else SHARES if float in kinds else WRONG
    return st.sampled_from([*of, *of, *of, *of, *WRONG[: len(of) // 2]])


@st.composite
def calls(draw, names):
    """A technique with some of its options."""
    cls = registry()[draw(st.sampled_from(names))]
    options = {"technique": cls.card.name, **cls.card.example}
    for name, field in cls.model_fields.items():
        if draw(st.integers(0, 3)) == 0:
            options[name] = draw(values(field.annotation))
    return options


@st.composite
def questions(draw):
    """A model, a cluster, a workload, and mostly techniques for such a task, with what they need beside them."""
    workload, known = draw(WORKLOADS), registry()
    fitting = sorted(name for name, t in known.items() if workload["kind"] in t.card.tasks)
    chosen = draw(st.lists(calls(fitting if draw(st.integers(0, 9)) else sorted(known)), max_size=4))
    plan = {c["technique"]: c for c in chosen}
    partner = [o for name in plan for o in partners(make(Call(name=name, options=dict(known[name].card.example))))]
    for other in [o for o in partner if workload["kind"] in known[o].card.tasks]:
        plan.setdefault(other, {"technique": other, **known[other].card.example})
    on = f"{draw(st.sampled_from([1, 1, 2, 3]))}x{draw(COUNTS)}x{draw(st.sampled_from(DEVICES))}"
    return draw(st.sampled_from(MODELS) | made_up()), on, workload, list(plan.values())


def ask(model, on, workload, plan):
    """The prediction, or None where the question is refused."""
    try:
        result = predict(experiments.make(model, on, workload, plan))
    except UserError:
        return None
    values = {name: m.value for name, m in result.metrics.items()}
    values |= {f"memory {m.category}": m.bytes for m in result.memory}
    for row in result.breakdown:
        values |= {f"{row.phase} {row.operator} {k}": getattr(row, k) or 0.0
                   for k in ("seconds", "flops", "bytes", "link_bytes", "exposed_seconds")}  # fmt: skip
    wrong = {k: v for k, v in values.items() if isinstance(v, complex) or not (math.isfinite(v) and v >= 0)}
    assert not wrong
    return result


@settings(suppress_health_check=list(HealthCheck))
@given(questions())
def test_a_question_has_an_answer_or_one_message(question):
    ask(*question)


def test_activations_that_are_all_gone_are_not_less_than_none():
    plan = [{"technique": "swap_advisor", "budget": "640kB", "share": 0.01}]
    assert ask("bert-base", "a100-40g-pcie", {"kind": "pretrain", "seq_len": 2}, plan)
