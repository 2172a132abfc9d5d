"""Every technique that serves, and every pair that the support matrix lets through (of these a part, the others at
night: ``tests/crossings.py``), in the real engine: the tokens and log-probabilities of the same model without one.

Quantized weights are expanded to the type that this CPU multiplies fastest, so both types are forced. A new technique
file takes part by itself.
"""

from array import array
from itertools import combinations

import pytest
import torch
from tests.crossings import crossing
from tests.serving import ask, collect, run

from ridgeline.nn.kernels import native
from ridgeline.nn.memory.kv_pool import Piece
from ridgeline.nn.model.generate import make_cache
from ridgeline.nn.model.init import build
from ridgeline.nn.quant import native_codes, torch_codes
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.runtime.build import Build
from ridgeline.serve.build_engine import make_engine
from ridgeline.serve.runner import PackedStep
from ridgeline.spec.decode_kernel import OTHER_PARTS, refusal
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.workload import Serve
from ridgeline.techniques.matrix import CPU, TINY
from ridgeline.techniques.registry import check, normalize, registry

SERVES = {
    n: t
    for n, t in registry().items()
    if t.card.runs
    and "serve" in t.card.tasks & (t.card.runs_in or t.card.tasks)
    and t.card.min_ranks == 1  # several processes: test_ranks.py
}


def experiment(*names):
    """A small serving experiment with the techniques' example options."""
    calls = tuple(Call(name=n, options=dict(SERVES[n].card.example)) for n in names)
    model = TINY.model_copy(update={k: v for n in names for k, v in SERVES[n].card.needs_model.items()})
    w = Serve(prompt_len=8, output_len=4, kv_cache_bytes=1 << 20, max_num_batched_tokens=12)
    return normalize(Experiment(model=model, cluster=Cluster(device=CPU), workload=w, plan=Plan(calls=calls)))


def refused(*names):
    """The sentence that refuses them together, or nothing."""
    try:
        check(experiment(*names))
    except Incompatible as e:
        return f"{e.what}; {e.fix}"
    return ""


PAIRS = list(combinations(SERVES, 2))
CASES = [*((n,) for n in SERVES), *(p for p in PAIRS if not refused(*p))]
PROMPTS = [[1, 2, 3], list(range(20)), [400, 5] * 5, [7]]
MEMORY = {"dynamic_memory", "length_aware_memory"}
"""Techniques that replay recorded operators: always tried with every kind of codes and type."""


def codes_of(name):
    """The kinds of codes that layers hold with this technique: their bits, group, tensors, whether they are floats;
    none if they hold weights."""
    e = experiment(name)
    model = build(e.model, torch.device("cpu"), torch.float32, 0).requires_grad_(False)
    run = Build(e, model, torch.device("cpu"))
    for t in check(e):
        if "generate" in t.card.tasks:
            t.build(run)
    held = [m for m in model.modules() if isinstance(m, PackedLinear)]

    def kind(m):
        tensors = frozenset((name, t.dtype) for name, t in m.codes.state_dict().items())
        return m.bits, m.group_size, type(m.codes), tensors, getattr(m.codes, "floating", None)

    return frozenset(map(kind, held))


CODED = {n: kinds for n in SERVES if (kinds := codes_of(n))}
FIRST = {kinds: n for n, kinds in reversed(CODED.items())}.values()
"""One technique for each kind of codes: to the engine others with the same are the same."""
WIDE = [
    pytest.param(names, wide, id=f"{'+'.join(names)}-{wide}",
                 marks=[] if len(names) == 1 or (MEMORY & set(names) and set(FIRST) & set(names))
                 else crossing("+".join(names)))
    for names in CASES
    for wide in ((torch.float32, torch.bfloat16) if CODED.keys() & set(names) else (None,))
]  # fmt: skip


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", sorted(SERVES))
def test_the_engine_computes_layers_in_one_kernel_where_predictions_say_so(name, fused):
    """Which is where attention is one kernel, too."""
    names = dict.fromkeys([name, "flash_attention"] if fused else [name])
    if refused(*names):
        pytest.skip("they do not go together")
    e = experiment(*names)
    parts = {part for t in check(e) for part in t.parts}
    runner = make_engine(e, torch.device("cpu")).runner
    wanted = native.library() is not None and "fused_attention" in parts
    wanted = wanted and not parts & OTHER_PARTS and not refusal(e.model)
    step = runner.arrange(PackedStep([], [5], [2], [2], [Piece(0, 1, [(0, 3)], False, 3, array("i", [0]))]))
    assert (runner.decoder is not None and step.singles is not None) == wanted


def test_some_formats_hold_codes():
    assert {"rtn", "gptq"} <= CODED.keys()


@pytest.mark.parametrize(("names", "wide"), WIDE)
def test_what_is_served_is_what_the_model_says(names, wide, monkeypatch):
    if wide is not None:  # as with matrix units, which take dequantized weights, and as without
        for module in (native_codes, torch_codes):
            monkeypatch.setattr(module, "wide_dtype", lambda: wide)
        monkeypatch.setattr(native_codes, "FEW_ROWS", 0)
    served_as_computed(experiment(*names))


@pytest.mark.parametrize("tied", [False, True])
def test_heads_in_codes_are_served(tied):
    e = experiment("rtn")
    calls = (Call(name="rtn", options={"bits": 8, "head_bits": 8}),)
    model = e.model.model_copy(update={"tie_embeddings": tied})
    coded = e.model_copy(update={"model": model, "plan": Plan(calls=calls)})
    engine = served_as_computed(coded)
    assert isinstance(engine.model.head.out, PackedLinear)


def served_as_computed(e):
    """Serve prompts: tokens and their log-probabilities are those of the model by itself. Returns the engine."""
    made = check(e)
    eng = make_engine(e, torch.device("cpu"))
    _, events = run(eng, *[ask(str(i), p, 6, logprobs=0) for i, p in enumerate(PROMPTS)])
    tokens = collect(events)
    model = build(e.model, torch.device("cpu"), torch.float32, e.workload.seed).requires_grad_(False)
    plain = Build(e, model, torch.device("cpu"))
    lossy = [t for t in made if not t.card.lossless]
    for t in made:
        if "generate" in t.card.tasks:
            t.build(plain)
    for i, prompt in enumerate(PROMPTS):
        out = tokens[str(i), 0]
        with torch.inference_mode():
            whole = torch.tensor([[*prompt, *out]])
            logp = plain.model(whole, cache=make_cache(plain.model, 1, 64))[0].log_softmax(-1)[len(prompt) - 1 : -1]
        told = torch.tensor([p.logprob for ev in events if ev.request == str(i) for p in ev.logprobs])
        said = logp.gather(1, torch.tensor(out)[:, None])[:, 0]
        tolerance = max((t.card.tolerance for t in lossy), default=2e-5)
        torch.testing.assert_close(told, said, rtol=tolerance, atol=tolerance)
        if not lossy:
            assert out == logp.argmax(1).tolist()
    return eng


def test_refusals_say_why():
    said = {p: refused(*p) for p in PAIRS if p not in CASES}
    assert said
    assert all(len(why) > 20 for why in said.values())
