"""Many outputs of one request, priorities, and what ranks: the engine against whole passes of the model."""

import json
from dataclasses import replace

import pytest
import torch
from tests.serve.test_reliability import call, error
from tests.serving import alone, ask, beams_alone, engine, model, run

from ridgeline.serve.request import EngineRequest, Invalid, Sampling


@pytest.fixture(scope="module")
def llama():
    return model()


def widest_step(eng):
    """Runs the engine to its end → the most sequences that a step computed."""
    found, real = [], eng.runner.run

    def counted(batch, copies):
        found.append(len(batch))
        return real(batch, copies)

    eng.runner.run = counted
    got, _ = run(eng)
    return max(found), got


@pytest.mark.parametrize("more", [{"n": 12}, {"n": 2, "best_of": 12}, {"n": 12, "beam_width": 12, "temperature": 0.0}])
def test_forks_count_against_max_num_seqs(llama, more):
    eng = engine(llama, max_num_seqs=4)
    settings = {"temperature": 1.0, "seed": 3, **more} if "beam_width" not in more else more
    requests = [ask(str(i), [i + 1, 2, 3], 6, **settings) for i in range(3)]
    for r in requests:
        eng.add(r)
    widest, got = widest_step(eng)
    assert widest <= 4
    for r in requests:
        if "beam_width" in more:
            assert [got[r.id, i] for i in range(12)] == beams_alone(llama, r)
        elif "best_of" not in more:
            assert {i: got[r.id, i] for i in range(12)} == alone(llama, r)


def test_prompts_wait_for_the_forks_of_others(llama):
    """32 prompts of 8 outputs do not become 256 sequences at once."""
    eng = engine(llama, max_num_seqs=8)
    for i in range(32):
        eng.add(ask(str(i), [i + 1, 2], 4, n=8, temperature=1.0))
    most = 0
    while eng.has_work():
        eng.step()
        most = max(most, len(eng.scheduler.running))
        eng.check()
    assert most == 8


@pytest.mark.parametrize("more", [{"n": 20, "seed": 4, "temperature": 1.0}, {"prompt_logprobs": 2, "logprobs": 1},
                                  {"n": 4, "beam_width": 9}])  # fmt: skip
def test_logits_are_there_for_a_block_of_rows_at_once(llama, more):
    eng = engine(llama)
    eng.rows_at_once = 3
    rows, head, chosen = [], eng.runner.logits, eng.sampler.adjust

    def logits(hidden):
        rows.append(len(hidden))
        return head(hidden)

    def adjust(x, seqs, short=None):
        rows.append(len(x))
        return chosen(x, seqs, short)

    eng.runner.logits, eng.sampler.adjust = logits, adjust
    r = ask("r", list(range(10)), 5, **more)
    got, events = run(eng, r)
    assert max(rows) <= 3
    if r.sampling.beam_width:
        assert [got["r", i] for i in range(4)] == beams_alone(llama, r)
    else:
        assert {i: got["r", i] for i in range(r.sampling.n)} == alone(llama, r)
    if r.sampling.prompt_logprobs:
        _, whole = run(engine(llama), r)
        assert [p.token for p in events[0].prompt_logprobs] == [p.token for p in whole[0].prompt_logprobs]
        told = [[p.logprob for p in found[0].prompt_logprobs] for found in (events, whole)]
        assert told[0] == pytest.approx(told[1])


def test_a_large_vocabulary_has_smaller_blocks():
    """What a request may take at once does not grow with the vocabulary."""
    for size in (300, 4000):
        eng = engine(model(vocab_size=size, hidden_size=8, head_dim=2, num_layers=1))
        assert eng.rows_at_once * size <= 1 << 24
        assert (eng.rows_at_once + 1) * size > 1 << 24


# ---- priorities ----------------------------------------------------------------------------------------------------


def order_of_ends(eng, *requests):
    for r in requests:
        eng.add(r)
    ended = []
    while eng.has_work():
        ended += [e.request for e in eng.step() if e.finish]
        eng.check()
    return ended


def with_priority(name, priority, new=3):
    return EngineRequest(name, [1, 2, 3], Sampling(max_tokens=new, temperature=0.0), priority=priority)


def test_lower_priorities_go_first_and_equal_ones_in_turn(llama):
    asked = [("a", 0), ("b", 5), ("c", -1), ("d", 5), ("e", 0), ("f", -1)]
    ended = order_of_ends(engine(llama, max_num_seqs=1), *(with_priority(*a) for a in asked))
    assert ended == ["c", "f", "a", "e", "b", "d"]


def test_the_least_urgent_is_sent_back_when_the_pool_is_full(llama):
    blocks = {"kv_cache_bytes": 12 * 4 * 2 * 2 * 2 * 8 * 8}  # 12 blocks of 4 tokens: each takes 9
    eng = engine(llama, "paged_kv:block_size=4", **blocks)
    ended = order_of_ends(eng, with_priority("late", 7, 30), with_priority("urgent", 0, 30))
    assert eng.stats().preemptions > 0
    assert ended == ["urgent", "late"]


def test_a_policy_that_orders_the_queue_itself_takes_no_priority(llama):
    eng = engine(llama, "-padding_free", "length_dp")
    with pytest.raises(Invalid, match="priority"):
        eng.add(with_priority("a", 1))
    eng.add(with_priority("b", 0))
    run(eng)


# ---- temperature and ranges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 9.9e-6, 1e-5])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}])
def test_a_temperature_next_to_zero_is_greedy(temperature, more):
    """In fp32, which has no 1e-40 to divide by."""
    made = model(dtype=torch.float32)
    got, events = run(engine(made), ask("r", [1, 2, 3], 8, temperature=temperature, seed=1, **more))
    assert not any(e.error for e in events)
    assert got == run(engine(made), ask("r", [1, 2, 3], 8))[0]


@pytest.mark.parametrize("value", [1e-300, 1e-40, 0.0])
def test_a_penalty_that_leaves_no_numbers_is_refused(server, value):
    status, _, said = call(server, "/v1/completions", {"prompt": "a", "repetition_penalty": value})
    assert (status, error(said)["param"]) == (400, "repetition_penalty")


def test_the_smallest_penalty_that_is_taken_gives_an_output(server):
    body = {"prompt": "a", "repetition_penalty": 0.01, "temperature": 1e-5, "max_tokens": 4}
    assert call(server, "/v1/completions", body)[0] == 200


# ---- ranked outputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param"),
    [({"temperature": 0.7}, "temperature"), ({"top_p": 0.5}, "top_p"), ({"top_k": 3}, "top_k"),
     ({"min_p": 0.1}, "min_p"), ({"seed": 1}, "seed"), ({"logprobs": 1}, "logprobs"), ({"stop": "a"}, "stop")],
)  # fmt: skip
def test_what_has_no_effect_on_beams_is_refused(server, change, param):
    body = {"prompt": "a", "n": 2, "use_beam_search": True, "max_tokens": 3}
    assert call(server, "/v1/completions", {**body, "temperature": 0})[0] == 200
    status, _, said = call(server, "/v1/completions", {**body, **change})
    assert (status, error(said)["param"]) == (400, param)


def test_chats_too(server):
    body = {"messages": [{"role": "user", "content": "a"}], "n": 2, "use_beam_search": True, "max_tokens": 3}
    status, _, said = call(server, "/v1/chat/completions", {**body, "logprobs": True})
    assert (status, error(said)["param"]) == (400, "logprobs")


class Until:
    """Finds its stop string in one token."""

    def __init__(self, token):
        self.token, self.stop = token, None

    def push(self, token):
        assert self.stop is None
        self.stop = "found" if token == self.token else None


def test_a_candidate_ends_at_its_stop_string_and_is_ranked_by_what_is_left(llama):
    settings = {"temperature": 1.0, "seed": 5}
    _, events = run(engine(llama), ask("m", [1, 2, 3], 12, n=5, logprobs=0, **settings))
    made = {i: [p for e in events if e.index == i for p in e.logprobs] for i in range(5)}
    stop = made[0][3].token
    cut = {i: next((k + 1 for k, p in enumerate(ps) if p.token == stop), len(ps)) for i, ps in made.items()}
    assert min(cut.values()) < 12
    ranked = sorted(made, key=lambda i: -sum(p.logprob for p in made[i][: cut[i]]) / cut[i])
    request = ask("b", [1, 2, 3], 12, n=2, best_of=5, **settings)
    eng = engine(llama)
    got, events = run(eng, replace(request, watch=lambda: Until(stop)))
    for index, of in enumerate(ranked[:2]):
        assert got["b", index] == [p.token for p in made[of][: cut[of]]]
    assert [e.stop_string for e in events] == [("found" if made[i][cut[i] - 1].token == stop else None)
                                               for i in ranked[:2]]  # fmt: skip
    assert eng.stats().generated_tokens == sum(cut.values()), "none runs on"


@pytest.mark.parametrize("include", [False, True])
def test_best_of_says_what_the_outputs_say_one_by_one(server, include):
    body = {"prompt": "The cat", "temperature": 1.0, "seed": 11, "max_tokens": 30, "ignore_eos": True}

    def texts(**more):
        return [(c["text"], c["finish_reason"]) for c in
                json.loads(call(server, "/v1/completions", {**body, **more})[2])["choices"]]  # fmt: skip

    stop = texts(n=5)[0][0][4]
    more = {"stop": stop, "include_stop_str_in_output": include}
    generated = [server.engine.stats().generated_tokens]
    for asked in ({"n": 5}, {"n": 4, "best_of": 5}):
        generated.append((texts(**asked, **more), server.engine.stats().generated_tokens))
    start, (single, upto), (best, end) = generated
    assert end - upto == upto - start, "no candidate runs on behind its stop string"
    assert any(finish == "stop" for _, finish in best)
    assert set(best) <= set(single)
    assert len(best) == 4
