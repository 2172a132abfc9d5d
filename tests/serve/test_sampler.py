"""What the sampler draws, against the distribution that its settings say."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.nn.kernels import native
from ridgeline.serve.changes import Occurred
from ridgeline.serve.likelihoods import likelihoods
from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.serve.sampler import Sampler
from ridgeline.serve.sequence import Sequence, SequenceGroup

DRAWS = 3000


def expected(logits, s):
    """Probabilities after temperature, top-k, top-p and min-p, step by step on a sorted list."""
    p = (logits.double() / s.temperature).softmax(0)
    order = p.argsort(descending=True).tolist()
    if s.top_k:
        order = order[: s.top_k]
    total = sum(float(p[i]) for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass < s.top_p:
            kept.append(i)
        mass += float(p[i]) / total
    kept = [i for i in kept if float(p[i]) >= s.min_p * float(p[order[0]])]
    out = torch.zeros(len(p), dtype=torch.float64)
    out[kept] = p[kept]
    return out / out.sum()


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.5}, {"top_k": 7}, {"top_p": 0.6}, {"top_p": 0.999}, {"min_p": 0.2}, {"min_p": 1e-9},
     {"top_k": 20, "top_p": 0.5, "min_p": 0.05, "temperature": 1.5}],
)  # fmt: skip
def test_draws_follow_the_distribution(settings, hierarchical):
    s = Sampling(**settings)
    logits = torch.randn(1, 2000, generator=torch.Generator().manual_seed(3)) * 2
    rng = random.Random(1)
    seqs = [Sequence(SequenceGroup(EngineRequest("r", [1], s), 0), 0, [1], rng=rng) for _ in range(500)]
    sampler = Sampler(frozenset(), hierarchical)
    counts = torch.zeros(2000, dtype=torch.float64)
    for _ in range(DRAWS // 500):
        counts += torch.bincount(torch.tensor(sampler(logits.expand(500, -1).clone(), seqs)), minlength=2000)
    p = expected(logits[0], s)
    assert not counts[p == 0].any()
    # Pearson's statistic over the tokens that are expected often enough, the others together.
    often = p * DRAWS >= 5
    seen, due = counts[often], p[often] * DRAWS
    rest = float(p[~often].sum() * DRAWS)
    if rest >= 5:
        seen, due = torch.cat([seen, counts[~often].sum()[None]]), torch.cat([due, torch.tensor([rest])])
    chi = float(((seen - due) ** 2 / due).sum())
    degrees = max(1, len(due) - 1)
    assert chi < degrees + 4 * (2 * degrees) ** 0.5 + 4


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.0}, {}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.97, "temperature": 9.0},
     {"top_k": 3000}, {"top_k": 700, "top_p": 0.5, "min_p": 1e-3}, {"top_k": 40, "top_p": 0.99, "min_p": 0.3},
     {"min_p": 1e-6, "top_p": 0.999999}, {"temperature": 1e-4}],
)  # fmt: skip
def test_both_searches_choose_the_same(settings):
    logits = 3 * torch.randn(40, 5000, generator=torch.Generator().manual_seed(2))
    logits[10:20, 60:] = float("-inf")
    logits[20:25] /= 100
    chosen = []
    for hierarchical in (False, True):
        group = SequenceGroup(EngineRequest("r", [1], Sampling(**settings)), 0)
        seqs = [Sequence(group, 0, [1], rng=random.Random(i)) for i in range(40)]
        chosen.append(Sampler(frozenset(), hierarchical)(logits.clone(), seqs))
    assert chosen[0] == chosen[1]


def test_a_row_without_an_allowed_token_is_refused():
    logits = torch.zeros(3, 700)
    logits[1] = float("-inf")
    seqs = [Sequence(SequenceGroup(EngineRequest("r", [1], Sampling(top_p=0.5)), 0), 0, [1]) for _ in range(3)]
    if native.library() is None:
        pytest.skip("there is no C++ compiler")
    with pytest.raises(ValueError, match="no token"):
        Sampler(frozenset())(logits, seqs)


def test_a_grammar_is_obeyed():
    class Only:
        def allowed(self):
            return [5, 7]

    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(2)).expand(50, -1).clone()
    group = SequenceGroup(EngineRequest("r", [1], Sampling()), 0)
    seqs = [Sequence(group, 0, [1], rng=random.Random(i), grammar=Only()) for i in range(50)]
    assert set(Sampler(frozenset())(logits, seqs)) == {5, 7}


def test_the_tokens_that_occurred_are_known_while_a_sequence_grows():
    rng = random.Random(0)
    tokens, occurred = [], Occurred()
    while len(tokens) < 2000:
        tokens += [rng.randrange(400) for _ in range(rng.randrange(1, 60))]
        assert sorted(occurred.ids(tokens).tolist()) == sorted(set(tokens))


class Counted(TorchDispatchMode):
    """How many operators run."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def changed(sampling, rows, together):
    """Logits [rows, 50] as requests change them, all at once or one after the other; and operators that took."""
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(1))
    seqs = []
    for i in range(rows):
        seq = Sequence(SequenceGroup(EngineRequest("r", [1 + i, 2, 3], Sampling(**sampling)), []), 0, [1 + i, 2, 3])
        seq.tokens += [4, 5, 4]
        seq.counts.update({4: 2, 5: 1})
        seqs.append(seq)
    sampler = Sampler(frozenset(), False)
    with Counted() as seen:
        if together:
            sampler.adjust(logits, seqs, [False] * rows)
        else:
            for row, seq in zip(logits.split(1), seqs, strict=True):
                sampler.adjust(row, [seq], [False])
    return logits, seen.count


@pytest.mark.parametrize("sampling", [
    {"repetition_penalty": 1.3}, {"presence_penalty": 0.5, "frequency_penalty": 0.3}, {"logit_bias": {3: 2.0, 7: -1.0}},
    {"allowed_token_ids": (3, 9)}, {"bad_words": ((5, 4, 8), (9,))},
], ids=lambda s: "+".join(s))  # fmt: skip
def test_logits_of_all_requests_are_changed_at_once(sampling):
    whole, few = changed(sampling, 2, True)
    whole, many = changed(sampling, 9, True)
    apart, _ = changed(sampling, 9, False)
    assert torch.equal(whole, apart)
    assert not torch.equal(whole, changed({}, 9, True)[0])
    assert many == few


def test_a_grammar_that_lets_nothing_follow_leaves_no_token():
    class Nothing:
        def allowed(self):
            return []

    seq = Sequence(SequenceGroup(EngineRequest("r", [1], Sampling()), []), 0, [1], grammar=Nothing())
    logits = torch.zeros(1, 50)
    Sampler(frozenset(), False).adjust(logits, [seq], [False])
    assert logits.isneginf().all()


def test_more_of_the_likeliest_than_there_are_tokens():
    made = likelihoods(torch.randn(2, 6), torch.tensor([1, 2]), [9, 2], Sampler(frozenset()).search, ranked=True)
    found = made.read([1, 2], made.numbers.flatten().tolist())
    assert [len(f.top) for f in found] == [6, 2]
