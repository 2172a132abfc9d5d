"""Asynchronous scheduling: the same outputs as without it, whatever a request asks for and whatever goes wrong."""

import dataclasses
import threading

import pytest
import torch
from tests.serving import adapters_in, ask, collect, engine, model, run

from ridgeline.nn.kernels import native
from ridgeline.serve import sampler

PROMPTS = [[(7 * i + 3 * j * j) % 300 for j in range(3 + 5 * i)] for i in range(6)]
TINY = {"kv_cache_bytes": 24 * 4 * 2 * 2 * 2 * 8 * 8}  # 24 blocks of 4 tokens
DRAWN = {"temperature": 0.9, "seed": 5}
PLAIN = {
    "greedy": {},
    "drawn": DRAWN,
    "filtered": {**DRAWN, "top_p": 0.7, "top_k": 30},
    "min_p": {**DRAWN, "min_p": 0.02},
    "biased": {**DRAWN, "logit_bias": {7: 3.0}, "allowed_token_ids": tuple(range(200))},
    "several": {**DRAWN, "n": 3},
    "stops": {"temperature": 2.0, "seed": 8, "stop_token_ids": tuple(range(0, 300, 9))},
    "least": {"temperature": 2.0, "seed": 8, "min_tokens": 6, "stop_token_ids": tuple(range(0, 300, 9))},
}
"""Settings with which steps go ahead."""
KNOWING = {
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "logprobs": {**DRAWN, "logprobs": 3},
    "named": {"logprobs": 0, "logprob_token_ids": (4, 9)},
    "prompt": {"prompt_logprobs": 2},
    "words": {"bad_words": ((5, 6), (7,))},
    "best": {**DRAWN, "n": 2, "best_of": 4},
    "beams": {"n": 2, "beam_width": 3},
}
"""Settings with which the host chooses."""


@pytest.fixture(scope="module")
def llama():
    return model()


def both(made, make_requests, *plan, adapters=(), **fields):
    """(what a synchronous engine gives, what one that goes ahead gives, that engine). ``made``: None for a new model
    each."""
    found = []
    for ahead in (False, True):
        eng = engine(made or model(), *plan, **fields)
        for name, folder in dict(adapters).items():
            eng.load_adapter(name, folder)
        if ahead:
            assert eng.go_ahead() == ""
        _, events = run(eng, *make_requests())
        found.append(told(events))
        eng.close()
    return *found, eng


def told(events):
    """Tokens, log-probabilities and ends by output."""
    out = {}
    for e in events:
        tokens, logprobs, ends, prompt = out.setdefault((e.request, e.index), ([], [], [], []))
        tokens += e.tokens
        logprobs += [(p.token, round(p.logprob, 9)) for p in e.logprobs or ()]
        prompt += [(p.token, round(p.logprob, 9)) for p in e.prompt_logprobs or ()]
        if e.finish or e.error:
            ends.append((e.finish, e.stop_token, e.error))
    return out


def mixed(settings, new=14):
    """Every prompt with every setting."""
    return lambda: [ask(f"{name}{i}", p, new, **s) for name, s in settings.items() for i, p in enumerate(PROMPTS[::2])]


def ahead_steps(monkeypatch):
    """The batches of steps that were launched while another was flying."""
    from ridgeline.serve.async_steps import AsyncSteps

    seen, plain = [], AsyncSteps._launch
    monkeypatch.setattr(
        AsyncSteps, "_launch", lambda self, batch: seen.append(self.flying is not None) or plain(self, batch)
    )
    return seen


@pytest.mark.parametrize("fields", [{"max_num_batched_tokens": 16, "max_num_seqs": 5}, {}], ids=["chunks", "whole"])
def test_plain_requests(llama, fields, monkeypatch):
    flying = ahead_steps(monkeypatch)
    want, got, _ = both(llama, mixed(PLAIN), "paged_kv:block_size=4", **fields)
    assert got == want
    assert sum(flying) > len(flying) * 0.9 > 5


@pytest.mark.parametrize("stops", [(), tuple(range(1, 300, 5))])
def test_min_tokens_of_a_whole_batch(llama, stops, monkeypatch):
    """What load generators ask for: no row may end, by the model's tokens or the request's, before that many."""
    flying = ahead_steps(monkeypatch)
    settings = {"least": {"temperature": 3.0, "seed": 8, "min_tokens": 9, "stop_token_ids": stops}}
    want, got, _ = both(llama, mixed(settings, 40), ends=range(0, 300, 5))
    assert got == want
    assert all(len(tokens) > 9 for tokens, *_ in want.values())
    assert sum(ends[0][0] == "stop" for *_, ends, _ in want.values()) > 1
    assert sum(flying) > len(flying) * 0.8


def test_a_batch_of_all_settings(llama, monkeypatch):
    flying = ahead_steps(monkeypatch)
    want, got, _ = both(llama, mixed({**PLAIN, **KNOWING}), "paged_kv:block_size=4", max_num_seqs=12)
    assert got == want
    assert True in flying


@pytest.mark.parametrize("name", KNOWING)
def test_settings_for_which_the_host_chooses(llama, name, monkeypatch):
    """They share batches with one that goes ahead as long as it is alone."""
    flying = ahead_steps(monkeypatch)
    want, got, _ = both(llama, lambda: [ask("long", PROMPTS[4], 40, **DRAWN), *mixed({name: KNOWING[name]})()])
    assert got == want
    assert True in flying


def test_end_tokens_and_the_row_too_many(llama):
    for ahead in (False, True):
        eng = engine(llama, "paged_kv:block_size=4", ends=range(0, 300, 13))
        if ahead:
            eng.go_ahead()
        _, events = run(eng, *mixed({"drawn": {**DRAWN, "temperature": 3.0}, "several": {**DRAWN, "n": 4}}, 40)())
        if not ahead:
            want = told(events)
    assert told(events) == want
    assert sum(ends == [("stop", None, "")] for *_, ends, _ in want.values()) > 5


def test_preemption(llama, monkeypatch):
    flying = ahead_steps(monkeypatch)
    settings = {"greedy": {}, "drawn": DRAWN, "several": {**DRAWN, "n": 2}}
    want, got, eng = both(llama, mixed(settings, 30), "paged_kv:block_size=4", **TINY)
    assert got == want
    assert eng.stats().preemptions > 3
    assert True in flying


def test_prefixes_are_shared(llama):
    def requests():
        return [ask(f"r{i}", [*range(40), i], 12, **DRAWN) for i in range(4)]

    for ahead in (False, True):
        eng = engine(llama, "paged_kv:block_size=4")
        if ahead:
            eng.go_ahead()
        first = told(run(eng, ask("first", list(range(40)), 12))[1])
        _, events = run(eng, *requests())
        found = first | told(events)
        if not ahead:
            want = found
    assert found == want
    assert all(e.cached_tokens == 40 for e in events if e.finish)
    again = told(run(eng, ask("again", [*range(40), *want["first", 0][0]], 5))[1])  # blocks of generated tokens, too
    assert again == told(run(engine(llama), ask("again", [*range(40), *want["first", 0][0]], 5))[1])


def test_adapters(tmp_path):
    folders = adapters_in(tmp_path)

    def requests():
        plain = mixed({"greedy": {}, "drawn": DRAWN}, 12)()
        return [dataclasses.replace(r, adapter=["", *folders][i % (1 + len(folders))]) for i, r in enumerate(plain)]

    want, got, _ = both(None, requests, "multi_adapter", adapters=folders)
    assert got == want


def test_an_adapter_comes_and_goes_while_steps_fly(tmp_path):
    folders = adapters_in(tmp_path)
    eng = engine(model(), "multi_adapter")
    eng.go_ahead()
    eng.add(ask("long", PROMPTS[1], 40))
    for _ in range(4):
        eng.step()
    assert eng.ahead.flying is not None
    eng.load_adapter("lora", folders["lora"])
    assert eng.ahead.flying is None
    eng.add(dataclasses.replace(ask("adapted", PROMPTS[2], 9), adapter="lora"))
    _, events = run(eng)
    plain = engine(model(), "multi_adapter")
    plain.load_adapter("lora", folders["lora"])
    want, _ = run(plain, dataclasses.replace(ask("adapted", PROMPTS[2], 9), adapter="lora"))
    assert collect(events)["adapted", 0] == want["adapted", 0]
    eng.unload_adapter("lora")


def test_requests_that_are_cancelled_or_end_by_their_text(llama):
    want = told(run(engine(llama), *mixed({"drawn": DRAWN}, 20)())[1])
    eng = engine(llama, "paged_kv:block_size=4")
    eng.go_ahead()
    for r in mixed({"drawn": DRAWN}, 20)():
        eng.add(r)
    events = []
    for _ in range(6):
        events += eng.step()
        eng.check()
    assert eng.ahead.flying is not None
    assert eng.abort("drawn0")
    eng.finish("drawn1", 0)
    eng.add(ask("late", PROMPTS[3], 20, **DRAWN))  # may get their blocks
    _, rest = run(eng)
    found = told([*events, *rest])
    assert found["drawn2", 0] == want["drawn2", 0]
    assert found["late", 0] == told(run(engine(llama), ask("late", PROMPTS[3], 20, **DRAWN))[1])["late", 0]
    for name, ends in (("drawn0", [("abort", None, "")]), ("drawn1", [])):
        tokens, _, ended, _ = found[name, 0]
        assert 0 < len(tokens) < 20
        assert tokens == want[name, 0][0][: len(tokens)]
        assert ended == ends


@pytest.mark.parametrize("remembered", [0, 16])
def test_a_nucleus_that_was_larger_than_its_candidates(llama, remembered, monkeypatch):
    """The next step had another token: it is computed again, with the same random numbers. Once that is known of a
    sequence, its next steps have the right ones."""
    monkeypatch.setattr(sampler, "CANDIDATES", 4)
    monkeypatch.setattr(sampler, "WIDE_FOR", remembered)
    from ridgeline.serve.async_steps import _Step

    seen, plain = [], _Step.read

    def read(self):
        found = plain(self)
        seen.append(len(found[1]))
        return found

    monkeypatch.setattr(_Step, "read", read)
    settings = {"wide": {**DRAWN, "temperature": 5.0, "top_p": 0.9}, "greedy": {}, "several": {**DRAWN, "n": 2}}
    want, got, _ = both(llama, mixed(settings), "paged_kv:block_size=4", max_num_seqs=7)
    assert got == want
    assert sum(seen) > 20 if not remembered else 3 <= sum(seen) <= 6  # twice each: one step was launched already


@pytest.mark.parametrize("prompt", [False, True])
def test_one_faulty_request_fails_alone(llama, prompt):
    """A model that fails for one token of the vocabulary, in the prompt or generated."""
    requests = mixed({"greedy": {}, "drawn": DRAWN, "several": {**DRAWN, "n": 2}}, 16)
    want = told(run(engine(llama), *requests())[1])
    tokens = PROMPTS[2] if prompt else want["drawn1", 0][0][5:6]
    bad = next(t for t in tokens if sum(t in w[0] for w in want.values()) <= 3 and (prompt or t))
    eng = engine(llama, "paged_kv:block_size=4")
    eng.go_ahead()
    plain = eng.runner.embed

    def embed(ids, at):
        if (ids == bad).any():
            raise RuntimeError("boom")
        return plain(ids, at)

    eng.runner.embed = embed
    _, events = run(eng, *requests())
    found = told(events)
    failed = {key for key, (*_, ends, _) in found.items() if ends[-1][0] == "error"}
    assert failed
    assert all("boom" in found[key][2][-1][2] for key in failed)
    groups = {name for name, _ in failed}
    for key, value in want.items():
        if key[0] not in groups:
            assert found[key] == value


def test_logits_that_are_not_finite_fail_alone():
    made = model()
    want = told(run(engine(made), *mixed({"drawn": DRAWN}, 6)())[1])
    with torch.no_grad():
        made.embed.tokens.weight[299] = float("nan")
    eng = engine(made)
    eng.go_ahead()
    _, events = run(eng, ask("bad", [3, 299], 6), *mixed({"drawn": DRAWN}, 6)())
    found = told(events)
    assert found.pop(("bad", 0))[2] == [("error", None, "the model's logits are not finite")]
    assert found == want


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_row_without_a_token_fails_alone(llama, ahead, kernel):
    """Of which ``min_tokens`` forbids all that are allowed: by the compiled kernel and by PyTorch's operators."""
    made = model(dtype=torch.float32)
    want = told(run(engine(made), *mixed({"drawn": DRAWN}, 6)())[1])
    eng = engine(made, ends=(7,))
    if not kernel:
        eng.sampler.hierarchical = False
    if ahead:
        eng.go_ahead()
    bad = [ask(f"bad{i}", [3, 4], 6, min_tokens=2, **s) for i, s in enumerate(
        [{"allowed_token_ids": (7,)}, {"stop_token_ids": tuple(range(300)), **DRAWN}])]  # fmt: skip
    _, events = run(eng, *bad, *mixed({"drawn": DRAWN}, 6)())
    found = told(events)
    for i in range(2):
        tokens, _, ends, _ = found.pop((f"bad{i}", 0))
        assert (tokens, ends[0][0]) == ([], "error")
    assert found == want


@pytest.mark.parametrize("chunk", [3, 5, 8])
def test_forks_after_a_step_that_has_failed(llama, chunk):
    """The next one, launched behind it, was to copy blocks that the forks share."""
    request = [ask("r", PROMPTS[2], 12, n=3, **DRAWN)]
    want = told(run(engine(llama, max_num_batched_tokens=chunk), *request)[1])
    for fail in range(1, 7):
        eng, calls = engine(llama, max_num_batched_tokens=chunk), []
        eng.go_ahead()
        plain = eng.runner.execute

        def execute(*args, fail=fail, calls=calls, plain=plain):
            out = plain(*args)
            calls.append(out)
            if len(calls) == fail:
                raise RuntimeError("boom")
            return out

        eng.runner.execute = execute
        assert told(run(eng, *request)[1]) == want


def test_python_goes_on_while_a_step_is_computed(llama):
    """On a CPU a step of one's own thread waits for what another thread does after the engine has come back."""
    eng = engine(llama)
    eng.go_ahead()
    eng.add(ask("a", PROMPTS[1], 8))
    returned, where, plain = threading.Event(), [], eng.runner.execute

    def execute(*args):
        assert returned.wait(60)
        where.append(threading.current_thread())
        return plain(*args)

    eng.runner.execute = execute
    assert eng.step() == []
    returned.set()
    got, _ = run(eng)
    assert len(got["a", 0]) == 8
    assert set(where) != {threading.current_thread()}
    eng.close()


@pytest.mark.skipif(native.library() is None, reason="there is no compiled kernel")
def test_whole_layer_kernels():
    made = model(dtype=torch.float32)
    want, got, eng = both(made, mixed({"greedy": {}, "drawn": DRAWN}, 20), max_num_seqs=6)
    assert eng.runner.decoder is not None
    assert got == want


def test_engines_that_cannot(llama):
    eng = engine(llama, "speculative:ngram=3")
    assert "drafted" in eng.go_ahead()
    assert eng.ahead is None
