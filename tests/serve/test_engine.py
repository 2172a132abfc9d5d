"""The engine against whole forward passes without a cache: same tokens, whatever shares the batch."""

import dataclasses

import pytest
import torch
from tests.nn.conftest import CONFIGS, DECODERS
from tests.serving import alone, ask, beams_alone, collect, engine, greedy, model, run

from ridgeline.serve.request import Busy, EngineRequest, Invalid, Sampling
from ridgeline.spec.model import ModelSpec

PROMPTS = {f"r{i}": [(7 * i + 3 * j * j) % 300 for j in range(3 + 5 * i)] for i in range(6)}
TINY = {"kv_cache_bytes": 24 * 4 * 2 * 2 * 2 * 8 * 8}  # 24 blocks of 4 tokens


@pytest.fixture(scope="module")
def llama():
    return model()


SERVED = {**{name: CONFIGS[name] for name in DECODERS},
          "windows_everywhere": {**CONFIGS["llama4"], "no_rope_layers": [1, 1, 1, 1], "attn_temperature_tuning": False},
          "phi3": {**CONFIGS["phi3"], "rope_scaling": None}}  # fmt: skip
"""One model of every kind. (The server has one table of rotary frequencies for sequences of all lengths.)"""


@pytest.mark.parametrize("name", SERVED)
def test_tokens_are_those_of_whole_passes_for_every_kind_of_model(name):
    spec = ModelSpec.from_config({**SERVED[name], "vocab_size": 300}, name=name)
    made = model(**spec.model_dump())
    got, _ = run(engine(made, max_num_batched_tokens=16), *[ask(k, p, 5) for k, p in PROMPTS.items()])
    assert got == {(k, 0): greedy(made, p, 5) for k, p in PROMPTS.items()}


@pytest.mark.parametrize(
    "plan",
    [(), ("-paged_kv",), ("-continuous_batching",), ("-chunked_prefill",), ("-hierarchical_search",),
     ("paged_kv:block_size=1",), ("paged_kv:prefix_sharing=false",)],
)  # fmt: skip
def test_no_technique_changes_a_token(llama, plan):
    requests = [ask(k, p) for k, p in PROMPTS.items()]
    got, _ = run(engine(llama, *plan, max_num_batched_tokens=16, max_num_seqs=3), *requests)
    assert got == {(k, 0): greedy(llama, p, 8) for k, p in PROMPTS.items()}


def test_static_batches_wait_for_their_last_member(llama):
    eng = engine(llama, "-continuous_batching", max_num_seqs=2)
    for name, new in (("short", 2), ("long", 6), ("next", 2)):
        eng.add(ask(name, [1, 2, 3], new))
    order = []
    while eng.has_work():
        order += [e.request for e in eng.step() if e.tokens]
    assert order.index("next") == order.index("long") + order.count("long") + 1  # beside two tokens of "short"


def test_a_small_pool_preempts_and_everybody_ends_with_the_same_tokens(llama):
    eng = engine(llama, "paged_kv:block_size=4", **TINY)
    requests = [ask(k, p, 40) for k, p in PROMPTS.items()]
    got, events = run(eng, *requests)
    assert eng.stats().preemptions > 0
    assert got == {(k, 0): greedy(llama, p, 40) for k, p in PROMPTS.items()}
    assert sum(e.finish == "length" for e in events) == len(PROMPTS)


def test_a_prompt_in_pieces_delays_no_running_sequence(llama):
    eng = engine(llama, max_num_batched_tokens=8)
    eng.add(ask("short", [1, 2, 3], 20))
    eng.step()
    eng.add(ask("long", [5] * 60, 2))
    tokens = [sum(len(e.tokens) for e in eng.step() if e.request == "short") for _ in range(8)]
    assert tokens == [1] * 8


def test_equal_prefixes_are_computed_once(llama):
    eng = engine(llama, "paged_kv:block_size=4")
    first, second = [*range(40), 99], [*range(40), 77, 78]
    _got, events = run(eng, ask("a", first))
    again, events = run(eng, ask("b", second))
    assert again["b", 0] == greedy(llama, second, 8)
    assert events[-1].cached_tokens == 40
    assert eng.stats().cached_tokens == 40
    assert eng.stats().prompt_tokens == 41 + 2
    for change in ({"salt": b"x"}, {"adapter": "other"}):
        seq = dataclasses.replace(ask("c", second), **change)
        if "adapter" in change:
            continue
        _, events = run(eng, seq)
        assert events[-1].cached_tokens == 0


def test_seeds_do_not_depend_on_the_batch(llama):
    settings = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05, "top_p": 0.95}, {"repetition_penalty": 1.3},
                {"presence_penalty": 1.0, "frequency_penalty": 0.5}, {"logit_bias": {5: 4.0, 9: -100.0}}]  # fmt: skip
    requests = [ask(f"s{i}", [i + 1, 2, 3], 12, temperature=0.9, seed=i, **s) for i, s in enumerate(settings)]
    got, _ = run(engine(llama), *requests)
    for r in requests:
        assert got[r.id, 0] == alone(llama, r)[0]


def test_several_outputs_share_their_prompt_and_differ(llama):
    r = ask("r", list(range(30)), 10, temperature=1.0, seed=3, n=4)
    eng = engine(llama, "paged_kv:block_size=4")
    eng.add(r)
    eng.step()
    assert eng.blocks.used < 4 * 8
    got, _ = run(eng)
    events_of = alone(llama, r)
    assert len({tuple(t) for t in events_of.values()}) > 1
    for index, tokens in events_of.items():
        assert got[("r", index)] == tokens[1:]  # the first came with the first step


def test_best_of_returns_the_likeliest(llama):
    many = ask("m", [1, 2, 3], 6, temperature=1.0, seed=5, n=5, logprobs=0)
    _, events = run(engine(llama), many)
    mean = {}
    for e in events:
        mean.setdefault(e.index, []).extend(p.logprob for p in e.logprobs)
    ranked = sorted(mean, key=lambda i: -sum(mean[i]))
    got, _ = run(engine(llama), ask("b", [1, 2, 3], 6, temperature=1.0, seed=5, n=2, best_of=5))
    made = collect(events)
    assert [got["b", 0], got["b", 1]] == [made["m", ranked[0]], made["m", ranked[1]]]


def test_logprobs_are_those_of_the_whole_pass(llama):
    prompt = [4, 8, 15, 16, 23, 42]
    _, events = run(engine(llama, max_num_batched_tokens=4), ask("r", prompt, 5, logprobs=3, prompt_logprobs=2))
    tokens = [*prompt, *collect(events)["r", 0]]
    with torch.inference_mode():
        logp = llama(torch.tensor([tokens]))[0].log_softmax(-1)
    told = [*events[0].prompt_logprobs, *(p for e in events for p in e.logprobs)]
    assert len(told) == len(tokens) - 1
    for at, p in enumerate(told):
        assert p.token == tokens[at + 1]
        assert p.logprob == pytest.approx(float(logp[at, p.token]))
        values, ids = logp[at].topk(len(p.top))
        assert [i for i, _ in p.top] == ids.tolist()
        assert [v for _, v in p.top] == pytest.approx(values.tolist())


def test_ends(llama):
    free = greedy(llama, [1, 2, 3], 12)
    end = free[4]
    first = free.index(end)
    got, events = run(engine(llama, ends=[end]), ask("r", [1, 2, 3], 12))
    assert got["r", 0] == free[: first + 1]
    assert events[-1].finish == "stop"
    got, _ = run(engine(llama, ends=[end]), ask("r", [1, 2, 3], 12, ignore_eos=True))
    assert got["r", 0] == free
    _, events = run(engine(llama), ask("r", [1, 2, 3], 12, stop_token_ids=(end,)))
    assert events[-1].stop_token == end
    assert events[-1].finish == "stop"
    got, _ = run(engine(llama, ends=[end]), ask("r", [1, 2, 3], 12, min_tokens=first + 3))
    assert len(got["r", 0]) >= first + 3
    assert end not in got["r", 0][: first + 3]


@pytest.mark.parametrize("settings", [{}, {"length_penalty": 0.5}, {"early_stopping": True}, {"beam_width": 2, "n": 1}])
def test_beams_are_those_of_whole_passes(llama, settings):
    ends = {7, 11, 200, 150, 33}
    requests = [ask(k, p, 10, **{"beam_width": 4, "n": 3, **settings}) for k, p in list(PROMPTS.items())[:4]]
    eng = engine(llama, "paged_kv:block_size=4", ends=ends, kv_cache_bytes=60 * 4 * 2 * 2 * 2 * 8 * 8)
    got, _ = run(eng, *requests)
    for r in requests:
        expected = beams_alone(llama, r, ends)
        assert [got[r.id, i] for i in range(len(expected))] == expected


def test_beams_survive_preemption(llama):
    requests = [ask(k, p, 24, beam_width=3, n=3) for k, p in list(PROMPTS.items())[:3]]
    eng = engine(llama, "paged_kv:block_size=4", **TINY)
    got, _ = run(eng, *requests)
    assert eng.stats().preemptions > 0
    for r in requests:
        assert [got[r.id, i] for i in range(3)] == beams_alone(llama, r)


def test_a_cancel_frees_blocks_at_once(llama):
    eng = engine(llama)
    for k, p in PROMPTS.items():
        eng.add(ask(k, p, 30))
    eng.step()
    held = eng.blocks.used
    assert eng.abort("r5")
    assert not eng.abort("r5")
    assert eng.blocks.used < held
    eng.check()
    assert [e.request for e in eng.step() if e.finish == "abort"] == ["r5"]
    eng.finish("r4", 0)
    _got, events = run(eng)
    assert "r4" not in {e.request for e in events}
    assert eng.blocks.used == 0


def test_one_bad_request_fails_alone(llama):
    eng = engine(llama)
    poison = 299
    embed = llama.embed.tokens.weight
    kept = embed[poison].clone()
    embed.data[poison] = float("nan")
    try:
        # Its own keys stay its own: the others never see them.
        got, events = run(eng, ask("bad", [1, poison, 3]), *[ask(k, p) for k, p in PROMPTS.items() if poison not in p])
    finally:
        embed.data[poison] = kept
    assert [(e.request, e.finish) for e in events if e.error] == [("bad", "error")]
    for k, p in PROMPTS.items():
        if poison not in p:
            assert got[k, 0] == greedy(llama, p, 8)


def test_an_exception_is_traced_to_its_request(llama):
    eng = engine(llama)
    whole = eng.runner.run

    def run_unless(batch, copies):
        if any(s.group.request.id == "bad" for s, _ in batch):
            raise RuntimeError("boom")
        return whole(batch, copies)

    eng.runner.run = run_unless
    got, events = run(eng, ask("bad", [1, 2, 3]), *[ask(k, p) for k, p in PROMPTS.items()])
    assert [(e.request, e.error) for e in events if e.error] == [("bad", "RuntimeError: boom")]
    assert all(got[k, 0] == greedy(llama, p, 8) for k, p in PROMPTS.items())


@pytest.mark.parametrize("where", ["allowed", "accept"])
def test_a_grammar_that_fails_fails_alone(llama, where):
    class Broken:
        def allowed(self):
            if where == "allowed":
                raise ValueError("boom")

        def accept(self, token):
            raise ValueError("boom")

        def fork(self):
            return Broken()

    bad = ask("bad", [1, 2, 3], temperature=1.0, grammar=Broken(), n=2)
    others = [ask(k, p, temperature=0.7, seed=1, logprobs=1, repetition_penalty=1.2) for k, p in PROMPTS.items()]
    got, events = run(engine(llama), bad, *others)
    assert {(e.request, e.error) for e in events if e.error} == {("bad", "ValueError: boom")}
    assert all(got[r.id, 0] == alone(llama, r)[0] for r in others)
    assert all(len(e.logprobs) == len(e.tokens) for e in events if e.request != "bad")


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (EngineRequest("x", []), "prompt"),
        (EngineRequest("x", [300]), "prompt"),
        (EngineRequest("x", [1] * 128), "prompt"),
        (EngineRequest("x", [1] * 120, Sampling(max_tokens=9)), "max_tokens"),
        (EngineRequest("x", [1], Sampling(temperature=-1)), "temperature"),
        (EngineRequest("x", [1], Sampling(top_p=0)), "top_p"),
        (EngineRequest("x", [1], Sampling(n=3, best_of=2)), "best_of"),
        (EngineRequest("x", [1], Sampling(logit_bias={300: 1.0})), "logit_bias"),
        (EngineRequest("x", [1], Sampling(logprobs=301)), "logprobs"),
        (EngineRequest("x", [1], Sampling(min_tokens=17)), "min_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(llama, request_, param):
    eng = engine(llama)
    with pytest.raises(Invalid) as e:
        eng.add(request_)
    assert e.value.param == param
    assert not eng.has_work()


def test_a_full_queue_is_refused(llama):
    eng = engine(llama)
    eng.limits.max_waiting = 2
    for i in range(2):
        eng.add(ask(str(i), [1]))
    with pytest.raises(Busy):
        eng.add(ask("2", [1]))
    run(eng)


def test_an_encoder_embeds_a_packed_batch():
    made = model("bert-base", num_kv_heads=4)
    prompts = [[(3 * j + i) % 300 for j in range(4 + 7 * i)] for i in range(5)]
    _, events = run(
        engine(made, max_num_batched_tokens=24), *[EngineRequest(str(i), p, embed=True) for i, p in enumerate(prompts)]
    )
    assert len(events) == 5
    for e in events:
        with torch.inference_mode():
            mean = made(torch.tensor([prompts[int(e.request)]]), return_hidden=True)[0].mean(0)
        torch.testing.assert_close(torch.tensor(e.embedding, dtype=torch.float64), mean)


def test_a_decoder_embeds_too(llama):
    _, events = run(
        engine(llama, max_num_batched_tokens=8), EngineRequest("e", list(range(30)), embed=True), ask("g", [1, 2])
    )
    with torch.inference_mode():
        mean = llama(torch.tensor([list(range(30))]), return_hidden=True)[0].mean(0)
    told = next(e for e in events if e.embedding)
    torch.testing.assert_close(torch.tensor(told.embedding, dtype=torch.float64), mean)


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8"])
def test_a_pool_of_codes_gives_the_tokens_of_the_coded_cache(dtype):
    from ridgeline.nn.model.generate import generate
    from ridgeline.nn.quant.quantized_kv import CodedCache

    made = model()
    got, _ = run(
        engine(made, f"kv_quant:dtype={dtype}", max_num_batched_tokens=16), *[ask(k, p) for k, p in PROMPTS.items()]
    )
    made.cache_of = lambda shape, d, device: CodedCache(dtype, shape, device)
    for k, p in PROMPTS.items():
        assert got[k, 0] == generate(made, torch.tensor([p]), 8)[0, len(p) :].tolist()
