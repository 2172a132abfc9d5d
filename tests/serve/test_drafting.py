"""Drafts change the number of passes, never the tokens; and they are left out where they do not pay."""

import random

import pytest
import torch
from tests.serving import alone, ask, engine, greedy, model, run, spec

from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.model.init import build
from ridgeline.serve.drafting import TERM, TRIAL, Drafting, NGrams
from ridgeline.spec.errors import UserError


def lookup(tokens, longest, most):
    return NGrams(longest).lookup(tokens, most)


def searched(tokens, longest, most):
    """By looking at every position."""
    for n in range(min(longest, len(tokens) - 1), 0, -1) if most else ():
        for at in range(len(tokens) - n - 1, -1, -1):
            if tokens[at : at + n] == tokens[-n:]:
                return tokens[at + n : at + n + most]
    return []


def test_lookup_while_a_sequence_grows():
    rng = random.Random(0)
    for longest in (1, 2, 4):
        tokens, grams = [], NGrams(longest)
        while len(tokens) < 300:
            tokens += [rng.randrange(4) for _ in range(rng.randrange(1, 9))]
            most = rng.randrange(5)
            assert grams.lookup(tokens, most) == searched(tokens, longest, most)


def test_lookup_finds_what_followed():
    assert lookup([1, 2, 3, 9, 1, 2, 3], 3, 4) == [9, 1, 2, 3]
    assert lookup([1, 2, 3, 9, 7, 3], 3, 2) == [9, 7]
    assert lookup([5, 5, 5], 3, 4) == [5]
    assert lookup([1, 2, 3], 3, 4) == lookup([1, 2, 1], 3, 0) == lookup([1], 3, 4) == []


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "seed": 3, "top_p": 0.8}]
)
def test_the_model_itself_drafts_what_it_says(tmp_path, settings):
    made = model()
    save_checkpoint(made, tmp_path)
    eng = engine(made, f"speculative:draft={tmp_path},tokens=4")
    requests = [ask(str(i), [i + 1, 5, 9], 20, **settings) for i in range(3)]
    got, _ = run(eng, *requests)
    s = eng.stats()
    for r in requests:
        assert got[r.id, 0] == alone(made, r)[0]
    assert s.drafted_tokens > 0
    if not settings:
        assert s.accepted_tokens == s.drafted_tokens
        assert s.steps < 20 - s.accepted_tokens // 3 + 2


def test_another_model_drafts_badly_and_nothing_changes(tmp_path):
    made = model()
    other = build(spec(num_layers=1), torch.device("cpu"), torch.float64, 7)
    save_checkpoint(other, tmp_path)
    eng = engine(made, f"speculative:draft={tmp_path},tokens=3")
    requests = [ask(str(i), [i + 1, 5, 9] * (i + 1), 15) for i in range(4)]
    got, _ = run(eng, *requests)
    assert eng.stats().drafted_tokens > 0
    for r in requests:
        assert got[r.id, 0] == greedy(made, r.prompt, 15)


def test_a_prompt_with_a_step_of_its_own_leaves_no_drafts_behind(tmp_path):
    made = model()
    save_checkpoint(made, tmp_path)
    eng = engine(made, f"speculative:draft={tmp_path},tokens=4", "-chunked_prefill", max_num_batched_tokens=16)
    asked = [ask("first", [1, 5, 9], 30), ask("long", list(range(15)), 5)]
    eng.add(asked[0])
    events = [e for _ in range(3) for e in eng.step()]
    assert eng.stats().drafted_tokens > 0
    got, more = run(eng, asked[1])  # checks what must hold between two steps
    assert {e.request: e for e in more}.keys() == {"first", "long"}
    said = [t for e in [*events, *more] if e.request == "first" for t in e.tokens]
    assert (said, got["long", 0]) == tuple(greedy(made, r.prompt, r.sampling.max_tokens) for r in asked)


def test_another_vocabulary_is_refused(tmp_path):
    save_checkpoint(build(spec(vocab_size=200)), tmp_path)
    with pytest.raises(UserError, match="200 tokens"):
        engine(model(), f"speculative:draft={tmp_path}")


def test_drafts_are_left_out_where_they_do_not_pay():
    made = {True: 0, False: 0}
    d = Drafting(lambda seqs, most: [], 4)
    for pays in (True, False):
        for _ in range(2 * TRIAL + TERM):
            running = 2 if pays else 40
            on = d.tokens(running) > 0
            made[pays] += on
            # With few running a draft gives three tokens in a slightly longer step, with many it only costs.
            d.observe(running, on, running * (3 if on and pays else 1), 1.3 if on else 1.0)
    assert made[True] == TRIAL + TERM
    assert made[False] == TRIAL
