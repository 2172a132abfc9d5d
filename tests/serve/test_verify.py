"""All tokens of a step at once, as on a GPU: outputs are those of choosing round by round, whatever is asked for."""

import pytest
import torch
from tests.serve.drafts import Oracle, drafted_by
from tests.serve.test_async import DRAWN, KNOWING, PLAIN, PROMPTS, mixed, told
from tests.serving import alone, ask, engine, model, run

from ridgeline.serve import likelihoods, sampler
from ridgeline.serve.likelihoods import OneCopy
from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.serve.sequence import Sequence, SequenceGroup
from ridgeline.serve.verify import places

REPORTED = {"logprobs": {**DRAWN, "logprobs": 3}, "all": {"logprobs": 300, "logprob_token_ids": (4, 9, 4)},
            "named": {**DRAWN, "logprobs": 2, "logprob_token_ids": (7,)}, "prompts": {"prompt_logprobs": 2},
            "both": {**DRAWN, "logprobs": 0, "prompt_logprobs": 0}}  # fmt: skip


@pytest.fixture(scope="module")
def llama():
    return model()


def at_once(made, *plan, rows=None, **fields):
    """An engine that chooses all tokens of a step at once, and counts its copies to the host."""
    eng = engine(made, *plan, **fields)
    eng.next_tokens.at_once = True
    if rows is not None:
        eng.rows_at_once = eng.next_tokens.rows_at_once = rows
    return eng


def full(events):
    """All that is said about each output."""
    out = {}
    for e in events:
        kept = out.setdefault((e.request, e.index), ([], [], [], []))
        kept[0].extend(e.tokens)
        kept[1].extend(e.logprobs or ())
        kept[2].extend(e.prompt_logprobs or ())
        if e.finish or e.error:
            kept[3].append((e.finish, e.stop_token, e.error))
    return out


def same(found, expected):
    """The same tokens and ends, and log-probabilities that differ by rounding: a copy of several rows is added up in
    another order than one of all."""
    assert {k: (v[0], v[3]) for k, v in found.items()} == {k: (v[0], v[3]) for k, v in expected.items()}
    for key, (_, *kinds, _) in expected.items():
        for some, wanted in zip(found[key][1:3], kinds, strict=True):
            assert [(p.token, p.rank, [t for t, _ in p.top]) for p in some] == [
                (p.token, p.rank, [t for t, _ in p.top]) for p in wanted]  # fmt: skip
            assert [p.logprob for p in some] == pytest.approx([p.logprob for p in wanted], rel=1e-9)
            values = [[v for p in ps for _, v in p.top] for ps in (some, wanted)]
            assert values[0] == pytest.approx(values[1], rel=1e-9)


@pytest.mark.parametrize("rows", [None, 3])
def test_a_batch_of_all_settings(llama, rows):
    requests = mixed(PLAIN | KNOWING | REPORTED)
    expected = full(run(engine(llama, max_num_seqs=64), *requests())[1])
    same(full(run(at_once(llama, max_num_seqs=64, rows=rows), *requests())[1]), expected)


@pytest.mark.parametrize("name", ["named", "logprobs", "both"])
def test_a_step_with_log_probabilities_is_one_copy(llama, name, monkeypatch):
    eng, copies = at_once(llama), []
    plain = OneCopy.read
    monkeypatch.setattr(OneCopy, "read", lambda self: (copies.append(len(self._parts)), plain(self)))
    for i, prompt in enumerate(PROMPTS[:4]):
        eng.add(ask(str(i), prompt, 4, **REPORTED[name]))
    while eng.has_work():
        copies.clear()
        eng.step()
        assert sum(n > 0 for n in copies) == 1


def test_numbers_that_would_be_too_many_are_copied_before(llama, monkeypatch):
    monkeypatch.setattr(likelihoods, "HELD", 50)
    waiting, plain = [], OneCopy.read
    monkeypatch.setattr(OneCopy, "read", lambda self: (waiting.append([len(t) for t, _ in self._parts]), plain(self)))
    requests = mixed(REPORTED)
    same(full(run(at_once(llama, rows=4), *requests())[1]), full(run(engine(llama), *requests())[1]))
    assert max(map(len, waiting)) > 1
    assert all(sum(some) <= 50 for some in waiting if len(some) > 1)


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}, {"logprobs": 2}, {"min_tokens": 6}],
)
def test_drafts_are_verified_at_once(llama, settings, rows):
    """Trees, of which one path is right: seeded requests keep their tokens, and random numbers follow one another."""
    given = {"temperature": 0.9, "n": 2, "stop_token_ids": tuple(range(0, 300, 7)), **settings}
    requests = [ask(f"s{i}", [i + 1, 2, 3], 12, seed=i, **given) for i in range(4)]
    truth = {(r.id, i): t for r in requests for i, t in alone(llama, r).items()}
    found = {}
    for make in (engine, at_once):
        eng = make(llama, "paged_kv:block_size=4", **({"rows": rows} if make is at_once else {}))
        got, events = run(drafted_by(eng, Oracle(truth, eng.spec.vocab_size)), *requests)
        assert got == truth
        found[make] = (full(events), eng.stats().accepted_tokens)
    same(found[at_once][0], found[engine][0])
    assert found[at_once][1] == found[engine][1] > 0


def test_random_numbers_of_places_that_are_not_reached_come_next(llama):
    """Drafts that are always wrong, beside penalties, without which nothing would be drafted."""
    requests = [ask(f"s{i}", p, 10, **DRAWN, logprobs=1) for i, p in enumerate(PROMPTS)]
    truth = {(r.id, i): t for r in requests for i, t in alone(llama, r).items()}
    wrong = {key: [(t + 1) % 300 for t in tokens] for key, tokens in truth.items()}
    eng = at_once(llama)
    got, _ = run(drafted_by(eng, Oracle(wrong, eng.spec.vocab_size)), *requests)
    assert got == truth


def test_places_of_trees():
    group = SequenceGroup(EngineRequest("r", [1], Sampling()), 0)
    seq = Sequence(group, 0, [1], draft=[6, 8, 5, 7, 9], parents=[-1, 0, -1, 2, 2])
    assert [(p.row, p.depth) for p in places(seq, 4)] == [(4, 0), (5, 1), (6, 2), (7, 1), (8, 2), (9, 2)]
    seq.parents = []
    assert [p.depth for p in places(seq, 0)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("remembered", [0, 1, 16])
def test_nuclei_larger_than_their_candidates(llama, remembered, monkeypatch):
    """Log-probabilities are those of the tokens that are chosen in the end; these are the same, whatever is known of
    the nuclei before."""
    monkeypatch.setattr(sampler, "WIDE_FOR", remembered)
    settings = {"wide": {**DRAWN, "temperature": 5.0, "top_p": 0.9, "logprobs": 2}, "drawn": {**DRAWN, "logprobs": 1},
                "some": {**DRAWN, "min_p": 0.2}}  # fmt: skip
    expected = full(run(engine(llama), *mixed(settings)())[1])
    monkeypatch.setattr(sampler, "CANDIDATES", 4)
    for rows in (None, 2):
        same(full(run(at_once(llama, rows=rows), *mixed(settings)())[1]), expected)


def test_logits_that_are_not_finite_fail_alone():
    made = model()
    expected = told(run(engine(made), *mixed({"drawn": DRAWN}, 6)())[1])
    with torch.no_grad():
        made.embed.tokens.weight[299] = float("nan")
    found = told(run(at_once(made), ask("bad", [3, 299], 6, logprobs=2), *mixed({"drawn": DRAWN}, 6)())[1])
    assert found.pop(("bad", 0))[2] == [("error", None, "the model's logits are not finite")]
    assert found == expected


@pytest.mark.parametrize("kernel", [True, False])
def test_a_row_that_cannot_be_chosen_for_fails_alone(kernel):
    """Without an allowed token, or with a grammar that fails: others keep their random numbers."""

    class Broken:
        def allowed(self):
            raise RuntimeError("boom")

        def accept(self, token): ...

        def fork(self): return self  # fmt: skip

    made = model(dtype=torch.float32)
    expected = told(run(engine(made), *mixed({"drawn": DRAWN}, 6)())[1])
    eng = at_once(made, ends=(7,))
    eng.sampler.hierarchical = kernel
    bad = [ask("bad0", [3, 4], 6, min_tokens=2, allowed_token_ids=(7,)), ask("bad1", [3, 4], 6, grammar=Broken())]
    found = told(run(eng, *bad, *mixed({"drawn": DRAWN}, 6)())[1])
    for i in range(2):
        tokens, _, ends, _ = found.pop((f"bad{i}", 0))
        assert (tokens, ends[0][0]) == ([], "error")
    assert found == expected
