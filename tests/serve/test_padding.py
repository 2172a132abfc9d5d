"""Packed and padded batches: the same answers, and exactly the FLOPs of the rows that each computes."""

import pytest
import torch
from tests.serving import ask, engine, greedy, model, run
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.serve.request import EngineRequest

PROMPTS = {f"r{i}": [(7 * i + 3 * j * j) % 300 for j in range(3 + 5 * i)] for i in range(6)}
LENGTHS = [len(p) for p in PROMPTS.values()]
LINEAR = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)


def embed(made, *plan, prompts=PROMPTS, **fields):
    eng = engine(made, *plan, **{"max_num_batched_tokens": 512, **fields})
    _, events = run(eng, *[EngineRequest(k, p, embed=True) for k, p in prompts.items()])
    assert not any(e.error for e in events)
    return {e.request: torch.tensor(e.embedding) for e in events}, eng.stats().steps


def linear_flops(made, *plan, **fields):
    with FlopCounterMode(display=False) as counted:
        embed(made, *plan, **fields)
    return sum(n for op, n in counted.get_flop_counts()["Global"].items() if op in LINEAR)


def per_token(made):
    """FLOPs of the layers' products for one token."""
    return sum(2 * p.numel() for n, p in made.named_parameters() if p.dim() == 2 and n.startswith("layers."))


@pytest.mark.parametrize("base", ["llama-mini", "mixtral-tiny", "gpt2"])
@pytest.mark.parametrize("plan", [(), ("-continuous_batching",), ("-chunked_prefill", "-paged_kv"), ("speculative",)])
def test_pads_change_no_token(base, plan):
    made = model(base, num_kv_heads=4 if base == "gpt2" else 2)
    requests = [ask(k, p) for k, p in PROMPTS.items()]
    got, _ = run(engine(made, "-padding_free", *plan, max_num_batched_tokens=16), *requests)
    assert got == {(k, 0): greedy(made, p, 8) for k, p in PROMPTS.items()}


@pytest.mark.parametrize("plan", [(), ("-padding_free",)])
def test_encoders_embed_as_alone(plan):
    made = model("bert-tiny")
    got, steps = embed(made, *plan)
    assert steps == 1
    for name, prompt in PROMPTS.items():
        with torch.inference_mode():
            alone = made(torch.tensor([prompt]), return_hidden=True)[0].mean(0)
        torch.testing.assert_close(got[name].to(alone), alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("base", ["bert-tiny", "llama-mini"])
def test_packed_flops_are_those_of_real_tokens_and_padded_ones_those_of_the_longest(base):
    made = model(base)
    assert linear_flops(made) == sum(LENGTHS) * per_token(made)
    assert linear_flops(made, "-padding_free") == len(LENGTHS) * max(LENGTHS) * per_token(made)


def test_pads_count_as_tokens_of_a_step():
    made = model("bert-tiny")
    few, steps = embed(made, "-padding_free", max_num_batched_tokens=2 * max(LENGTHS))
    many, _ = embed(made)
    assert steps > 1
    for name in PROMPTS:
        torch.testing.assert_close(few[name], many[name], rtol=1e-6, atol=1e-7)
    most = 2 * max(LENGTHS) * per_token(made)
    eng = engine(made, "-padding_free", max_num_batched_tokens=2 * max(LENGTHS))
    for k, p in PROMPTS.items():
        eng.add(EngineRequest(k, p, embed=True))
    while eng.has_work():
        with FlopCounterMode(display=False) as counted:
            eng.step()
        assert sum(n for op, n in counted.get_flop_counts()["Global"].items() if op in LINEAR) <= most
