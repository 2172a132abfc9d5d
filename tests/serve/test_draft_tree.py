"""Trees of drafts: whatever they propose, the tokens are those without them; and heads draft what their equations say.

Drafts come from an oracle (one path is right, others are not), so that acceptance, moves of what is kept, and rejected
rows all occur, and from heads with random weights, whose trees are compared with ones that are grown by whole passes.
"""

import itertools
import random

import pytest
import torch
from tests.serve.drafts import Oracle, always, drafted_by, untrained
from tests.serve.test_engine import PROMPTS, SERVED, TINY
from tests.serving import alone, ask, engine, experiment, greedy, model, run, spec

from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.kernels import native
from ridgeline.nn.model.draft_head import features_before
from ridgeline.nn.model.init import build
from ridgeline.predict import predict
from ridgeline.serve.build_engine import DEFAULT_PLAN
from ridgeline.serve.draft_tree import Candidate, child, moves, pruned, tree_paths
from ridgeline.spec.draft_head import CONFIG, TENSORS, head_spec
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.registry import check, normalize


@pytest.fixture(scope="module")
def llama():
    return model()


def truth_of(made, requests):
    return {(r.id, i): t for r in requests for i, t in alone(made, r).items()}


def compare(eng, requests, truth, **oracle):
    """Serve with trees of an oracle: the tokens, and that drafts were kept."""
    source = Oracle(truth, eng.spec.vocab_size, **oracle)
    moved = []
    inner = eng.runner.move
    eng.runner.move = lambda a, b: (moved.append(len(a)), inner(a, b))
    got, events = run(drafted_by(eng, source), *requests)
    assert got == truth
    assert eng.stats().accepted_tokens > 0.3 * sum(map(len, truth.values()))
    assert moved, "no kept node was elsewhere: the test would not see a wrong move"
    return events


# ---- trees -----------------------------------------------------------------------------------------------------------


def random_candidates(rng, count):
    found = []
    for i in range(count):
        parent = rng.randrange(-1, i)
        above = found[parent] if parent >= 0 else Candidate(0.0, 0, -1, 0)
        found.append(Candidate(above.score - rng.choice((0.0, 0.5, 1.0, 2.0)), above.level + 1, parent, i))
    return found


def test_the_likeliest_nodes_are_a_tree_again():
    """arXiv:2406.16858, section 4.2."""
    rng = random.Random(0)
    for count in range(1, 40):
        candidates, most, levels = random_candidates(rng, count), rng.randrange(1, count + 2), rng.randrange(1, 6)
        draft = pruned(candidates, most, levels)
        able = [c for c in candidates if c.level <= levels]
        assert len(draft.tokens) == min(most, len(able))
        parents = draft.parents or list(range(-1, len(draft.tokens) - 1))
        kept = {i: candidates[t] for i, t in enumerate(draft.tokens)}  # a candidate's token is its place
        for i, parent in enumerate(parents):
            assert parent < i
            assert kept[i].parent == (draft.tokens[parent] if parent >= 0 else -1)
        left = sorted((c.score for c in able), reverse=True)[: len(draft.tokens)]
        assert sorted((c.score for c in kept.values()), reverse=True) == left


def test_the_likeliest_path_comes_first():
    """So that keeping it needs no copies."""
    nodes = [Candidate(-1.0, 1, -1, 5), Candidate(-0.1, 1, -1, 6), Candidate(-1.5, 2, 0, 7), Candidate(-0.3, 2, 1, 8)]
    assert pruned(nodes, 4, 2) == ([6, 8, 5, 7], [-1, 0, -1, 2])
    assert pruned(nodes, 2, 2) == ([6, 8], []), "a chain has no parents"
    assert pruned(nodes, 4, 1) == ([6, 5], [-1, -1])


def test_paths_children_and_moves():
    draft, parents = [6, 8, 5, 7, 9], [-1, 0, -1, 2, 2]
    assert tree_paths(10, draft, parents) == [(10,), (10, 11), (10, 11, 12), (10, 13), (10, 13, 14), (10, 13, 15)]
    assert tree_paths(3, [1, 2], []) == [(3,), (3, 4), (3, 4, 5)]
    assert [child(draft, parents, n, t) for n, t in ((-1, 5), (2, 9), (2, 8), (0, 8), (4, 1))] == [2, 4, -1, 1, -1]
    assert [child([1, 2], [], n, t) for n, t in ((-1, 1), (0, 2), (0, 1), (1, 2))] == [0, 1, -1, -1]
    assert list(moves(10, [2, 4])) == [(13, 11), (15, 12)]
    assert list(moves(10, [0, 1])) == []


# ---- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVED)
def test_every_kind_of_model_verifies_trees(name):
    made = model(**ModelSpec.from_config({**SERVED[name], "vocab_size": 300}, name=name).model_dump())
    requests = [ask(k, p, 6) for k, p in PROMPTS.items()]
    compare(engine(made, max_num_batched_tokens=256), requests, truth_of(made, requests))


PLANS = [("-paged_kv",), ("-padding_free",), ("-continuous_batching",), ("-chunked_prefill",),
         ("paged_kv:block_size=1",), ("paged_kv:block_size=4",), ("dynamic_memory",), ("length_aware_memory",),
         ("multi_adapter",), ("multi_adapter", "-padding_free"), ("kv_offload",)]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids="+".join)
def test_every_schedule_verifies_trees(llama, plan):
    requests = [ask(k, p, 8) for k, p in PROMPTS.items()]
    compare(engine(llama, *plan, max_num_seqs=4), requests, truth_of(llama, requests))


def test_preempted_sequences_and_shared_prefixes(llama):
    prefix = [(3 * i) % 300 for i in range(20)]
    requests = [ask(f"p{i}", [*prefix, i], 40) for i in range(5)]
    eng = engine(llama, "paged_kv:block_size=4", **TINY)
    compare(eng, requests, truth_of(llama, requests))
    assert eng.stats().preemptions > 0
    eng.drafter.propose.truth = truth_of(llama, [ask("again", [*prefix, 3], 40)])
    again, events = run(eng, ask("again", [*prefix, 3], 40))
    assert again == eng.drafter.propose.truth
    assert events[-1].cached_tokens > 0, "what was moved is shared"


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}, {"logprobs": 2}])
def test_random_tokens_stay_those_of_their_seeds(llama, settings):
    requests = [ask(f"s{i}", [i + 1, 2, 3], 12, temperature=0.9, seed=i, n=2, **settings) for i in range(4)]
    compare(engine(llama, "paged_kv:block_size=4"), requests, truth_of(llama, requests))


def test_what_drafts_cannot_foresee_is_served_without(llama):
    """Penalties change with every token: beside others in the batch nothing is drafted for them."""
    requests = [ask("plain", [1, 2, 3], 30), ask("fined", [1, 2, 3], 12, repetition_penalty=1.5)]
    compare(engine(llama), requests, truth_of(llama, requests))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantized_cache_moves_its_codes(llama, kind):
    """Against the same cache without drafts."""
    requests = [ask(k, p, 16) for k, p in PROMPTS.items()]
    truth, _ = run(engine(llama, f"kv_quant:dtype={kind}"), *requests)
    compare(engine(llama, f"kv_quant:dtype={kind}"), requests, truth)


@pytest.mark.skipif(native.library() is None, reason="there is no compiler")
@pytest.mark.parametrize("fields", [{}, {"sliding_window": 6}, {"position": "alibi"}])
def test_the_compiled_kernels_follow_paths(fields):
    """In fp32, where whole layers run in one kernel: every token is the likeliest in fp64, but for rounding."""
    made, wide = (model(dtype=dtype, **fields) for dtype in (torch.float32, torch.float64))
    requests = [ask(k, p, 16) for k, p in PROMPTS.items()]
    truth = truth_of(made, requests)
    eng = engine(made, "paged_kv:block_size=4")
    got, _ = run(drafted_by(eng, Oracle(truth, 300)), *requests)
    assert eng.stats().accepted_tokens > 30
    for r in requests:
        tokens = [*r.prompt, *got[r.id, 0]]
        with torch.inference_mode():
            logits = wide(torch.tensor([tokens[:-1]]))[0, len(r.prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(got[r.id, 0])[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() < 1e-3


def test_steps_with_drafts_do_not_go_ahead(llama):
    requests = [ask(k, p, 12) for k, p in PROMPTS.items()]
    eng = drafted_by(engine(llama), Oracle(truth_of(llama, requests), 300))
    assert eng.go_ahead() == "tokens are drafted"
    assert eng.ahead is None


# ---- the distribution ------------------------------------------------------------------------------------------------


def test_sampled_tokens_have_the_models_distribution():
    """Chi-square of pairs of tokens behind drafts, over their exact distribution: temperature 1, fixed seeds."""
    made = model(vocab_size=8)
    prompt, count = [1, 5, 2], 1500
    with torch.inference_mode():
        rows = [[*prompt, *t] for n in range(3) for t in itertools.product(range(8), repeat=n)]
        p = {tuple(r): made(torch.tensor([r]))[0, -1].softmax(-1).tolist() for r in rows}
    exact = dict.fromkeys(itertools.product(range(8), repeat=2), 0.0)
    for first, second, third in itertools.product(range(8), repeat=3):
        before = p[tuple(prompt)][first] * p[(*prompt, first)][second]
        exact[second, third] += before * p[(*prompt, first, second)][third]

    class Guess(Oracle):
        def tree(self, seq, most):
            self.truth = {(seq.group.request.id, seq.index): [self.rng.randrange(8) for _ in range(4)]}
            return super().tree(seq, most)

    eng = drafted_by(engine(made), Guess({}, 8, wrong=2, right=1.0))
    found = dict.fromkeys(exact, 0)
    requests = [ask(str(i), prompt, 4, temperature=1.0, seed=i, n=100) for i in range(count // 100)]
    got, _ = run(eng, *requests, check=False)
    for tokens in got.values():
        found[tuple(tokens[1:3])] += 1  # the first is not drafted, and the last one neither
    assert sum(found.values()) == count
    assert eng.stats().accepted_tokens > count / 4
    rare = [k for k, x in exact.items() if x * count < 5]
    cells = [(found[k], exact[k] * count) for k in exact if k not in rare]
    cells.append((sum(found[k] for k in rare), sum(exact[k] for k in rare) * count + 1e-9))
    statistic = sum((a - b) ** 2 / b for a, b in cells if b > 1)
    free = sum(b > 1 for _, b in cells) - 1
    assert free > 10
    # Above this for one seed in 1000 (Wilson and Hilferty's approximation of the quantile).
    assert statistic < free * (1 - 2 / (9 * free) + 3.09 * (2 / (9 * free)) ** 0.5) ** 3


# ---- heads -----------------------------------------------------------------------------------------------------------

KINDS = ["llama", "mistral", "gemma3", "gpt2", "bloom", "deepseek_v3", "mixtral", "gpt_oss"]


@torch.inference_mode()
def predicted(made, head, tokens, beyond=()):
    """Features that the head predicts at all places of ``tokens``, of which the last are drafted: the features before
    those are ``beyond``."""
    ids = torch.tensor([tokens])
    real = made(ids[:, : len(tokens) - len(beyond)], return_hidden=True)
    features = torch.cat([real[:, : real.shape[1] - bool(beyond)], *(f[None, None] for f in beyond)], 1)
    before = features_before(torch.cat([features, features[:, -1:]], 1)[:, : len(tokens)])
    return head(made.embed(ids, torch.arange(len(tokens)), None), before)[0]


def by_whole_passes(made, head, tokens, levels, branches, nodes):
    """EAGLE-2's tree by its definition, each node by passes over all tokens before it."""
    root = predicted(made, head, tokens)[-1]
    found, level = [], [(-1, [], [root])]
    for depth in range(1, levels + 1):
        below = []
        for parent, path, features in level:
            scores = made.head(features[-1]).log_softmax(-1)
            values, ids = scores.topk(branches)
            for value, token in zip(values.tolist(), ids.tolist(), strict=True):
                above = found[parent].score if parent >= 0 else 0.0
                found.append(Candidate(above + value, depth, parent, token))
                below.append((len(found) - 1, [*path, token], features))
        below.sort(key=lambda b: -found[b[0]].score)
        level = [] if depth == levels else [
            (n, path, [*features, predicted(made, head, [*tokens, *path], features)[-1]])
            for n, path, features in below[:branches]
        ]  # fmt: skip
    return pruned(found, nodes, levels)


@pytest.mark.parametrize("name", KINDS)
def test_a_head_drafts_the_trees_of_its_equations(name, tmp_path):
    """Through the cache: prompts in pieces, what was accepted, several sequences at once."""
    made = model(**ModelSpec.from_config({**SERVED[name], "vocab_size": 300}, name=name).model_dump())
    head = untrained(made, tmp_path)
    eng = always(engine(made, f"speculative:draft={tmp_path},tokens=3,branches=3,nodes=9", "paged_kv:block_size=4",
                        max_num_batched_tokens=48))  # fmt: skip
    source, seen = eng.drafter.propose, 0

    def checked(seqs, most):
        nonlocal seen
        drafts = source(seqs, most)
        for s, n, draft in zip(seqs, most, drafts, strict=True):
            assert draft == by_whole_passes(made, head, s.tokens, n, 3, 9) if n else draft == ([], [])
            seen += bool(n)
        return drafts

    eng.drafter.propose = checked
    requests = [ask(k, p, 5) for k, p in list(PROMPTS.items())[:4]]
    got, _ = run(eng, *requests)
    assert seen > 10
    assert got == {(r.id, 0): greedy(made, r.prompt, 5) for r in requests}


@pytest.mark.parametrize("more", [(), ("kv_offload",)], ids="+".join)
def test_a_head_reads_what_prefixes_forks_and_preemption_leave(llama, tmp_path, more):
    """Its drafts are a function of the tokens, wherever its keys come from."""
    head = untrained(llama, tmp_path)
    eng = always(engine(llama, f"speculative:draft={tmp_path},tokens=3", "paged_kv:block_size=4", *more,
                        **TINY))  # fmt: skip
    source = eng.drafter.propose

    def checked(seqs, most):
        drafts = source(seqs, most)
        for s, n, draft in zip(seqs, most, drafts, strict=True):
            if draft.tokens:
                assert draft == by_whole_passes(llama, head, s.tokens, n, 1, n)
        return drafts

    eng.drafter.propose = checked
    prefix = [(3 * i) % 300 for i in range(20)]
    requests = [ask(f"p{i}", [*prefix, i], 20, temperature=0.8, seed=i, n=2) for i in range(3)]
    got, _ = run(eng, *requests)
    assert got == truth_of(llama, requests)
    run(eng, ask("other", [(5 * i) % 300 for i in range(36)], 8))  # which takes blocks of the prefix
    again, events = run(eng, ask("again", [*prefix, 1, 2], 6))
    assert events[-1].cached_tokens == 20 or not more
    assert again["again", 0] == greedy(llama, [*prefix, 1, 2], 6)
    assert eng.stats().preemptions > 0
    assert bool(eng.stats().restored_blocks) == bool(more)


def test_the_pool_counts_what_a_head_keeps(llama, tmp_path):
    untrained(llama, tmp_path)
    plain, drafted = (engine(llama, *plan).blocks.count for plan in ((), (f"speculative:draft={tmp_path}",)))
    keys = 2 * 2 * 8
    assert drafted == int(plain * 2 * keys / (3 * keys + 32 + 1))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_drafts_leave_the_others_their_next_block(llama, tmp_path):
    """The pool has a block more than the sequences need: none is preempted for another's drafts."""
    untrained(llama, tmp_path)
    plan = ("paged_kv:block_size=4", f"speculative:draft={tmp_path},tokens=6,branches=4,nodes=32")
    each = engine(llama, *plan, kv_cache_bytes=1 << 20).blocks.count / (1 << 20)
    eng = engine(llama, *plan, kv_cache_bytes=int(29.5 / each), max_num_seqs=4)
    assert eng.blocks.count == 29
    requests = [ask(str(i), [i + 1, 2, 3, 4, 5], 24) for i in range(4)]
    got, _ = run(always(eng), *requests)
    assert got == truth_of(llama, requests)
    assert eng.stats().preemptions == 0
    assert eng.stats().drafted_tokens > 0


def test_trees_are_no_larger_than_a_step(llama, tmp_path):
    untrained(llama, tmp_path)
    plan = f"speculative:draft={tmp_path},tokens=8,branches=6,nodes=128"
    eng = always(engine(llama, plan, max_num_batched_tokens=16, kv_cache_bytes=1 << 20))
    requests = [ask("a", [1, 2, 3], 24)]
    checked = []
    plain = eng.next_tokens._settle
    eng.next_tokens._settle = lambda kept: (checked.extend(len(s.draft) for s in kept), plain(kept))
    assert run(eng, *requests)[0] == truth_of(llama, requests)
    assert max(checked) == 15


@pytest.mark.parametrize("reserve", [False, True])
def test_a_draft_that_is_dropped_keeps_no_blocks(llama, tmp_path, reserve):
    untrained(llama, tmp_path)
    plan = [f"speculative:draft={tmp_path},tokens=8,branches=6,nodes=40", *(["-paged_kv"] if reserve else [])]
    if not reserve:
        plan.append("paged_kv:block_size=4")
    eng = always(engine(llama, *plan, max_num_batched_tokens=64, kv_cache_bytes=1 << 20))
    for i in range(4):  # whose trees do not fit a step together
        eng.add(ask(str(i), [i + 1, 2, 3, 4, 5], 24))

    def held(seqs):
        for seq in seqs:
            most = eng.scheduler._longest(seq) if eng.limits.reserve else len(seq.tokens)
            assert len(seq.blocks) <= eng.blocks.needed(max(most, len(seq.tokens)))

    def schedule():
        drafted = [seq for seq in eng.scheduler.running if seq.draft]
        batch = plain()
        dropped.append([seq for seq in drafted if not seq.draft and seq in eng.scheduler.running])
        held(dropped[-1])
        return batch

    dropped, plain = [], eng.scheduler.schedule
    eng.scheduler.schedule = schedule
    while eng.has_work():
        eng.step()
        eng.check()
        held(eng.scheduler.running)
    assert any(dropped)


def test_memory_counts_what_a_head_keeps(llama, tmp_path):
    untrained(llama, tmp_path)
    plain = engine(llama, kv_cache_bytes=1 << 20)
    eng = engine(llama, f"speculative:draft={tmp_path}", kv_cache_bytes=1 << 20)
    assert eng.blocks.count < plain.blocks.count
    assert eng.held()["kv_cache"] == pytest.approx(plain.held()["kv_cache"], rel=0.1)


@pytest.mark.parametrize("base", ["llama-mini", "mixtral-8x7b"])
def test_memory_counts_the_weights_of_what_drafts(base, tmp_path):
    """As predicted, to the byte."""
    made = model(base)
    save_checkpoint(made, tmp_path / "small")
    untrained(made, tmp_path / "head")
    plain = engine(made, kv_cache_bytes=1 << 20)
    for draft in ("head", "small"):
        plan = f"speculative:draft={tmp_path / draft}"
        found = engine(made, plan, kv_cache_bytes=1 << 20).held()["parameters"]
        assert found > plain.held()["parameters"]
        e = experiment(made.spec, [*DEFAULT_PLAN, plan], kv_cache_bytes=1 << 20, dtype="fp32", requests=1)
        (predicted,) = (m.bytes for m in predict(e).memory if m.category == "parameters")
        assert found == 2 * predicted, "the model here is in fp64"


def test_trees_need_a_head(llama):
    with pytest.raises(Incompatible, match=r"branches=4.*draft head"):
        check(normalize(experiment(llama.spec, ["speculative:branches=4"])))


def test_chains_have_no_size_of_trees(llama, tmp_path):
    untrained(llama, tmp_path)
    with pytest.raises(Incompatible, match=r"nodes=8.*branches=1"):
        engine(llama, f"speculative:draft={tmp_path},nodes=8")


def test_another_models_head_is_refused(llama, tmp_path):
    untrained(build(spec(hidden_size=48)), tmp_path)
    with pytest.raises(UserError, match=r"hidden_size = 48.*has 32"):
        engine(llama, f"speculative:draft={tmp_path}")


@pytest.mark.parametrize("what", ["json", "format", "tensors", "missing"])
def test_damaged_heads_are_refused(llama, tmp_path, what):
    untrained(llama, tmp_path)
    if what == "json":
        (tmp_path / CONFIG).write_text("{")
    elif what == "format":
        (tmp_path / CONFIG).write_text('{"format": 99}')
    elif what == "tensors":
        (tmp_path / TENSORS).write_bytes(b"no tensors")
    else:
        (tmp_path / TENSORS).unlink()
    with pytest.raises(UserError, match="draft_head") as refusal:
        engine(llama, f"speculative:draft={tmp_path}")
    assert refusal.value.fix


@pytest.mark.parametrize("other", ["tensor_parallel:degree=2", "splitwise"])
def test_a_head_needs_all_hidden_states(llama, tmp_path, other):
    untrained(llama, tmp_path)
    e = experiment(llama.spec, [f"speculative:draft={tmp_path}", "paged_kv", "continuous_batching", other])
    if "degree" in other:
        e = e.model_copy(update={"cluster": e.cluster.model_copy(update={"devices_per_node": 2})})
    with pytest.raises(Incompatible, match="draft head reads"):
        check(normalize(e))


def test_encoders_have_no_head():
    with pytest.raises(UserError, match="no decoder"):
        head_spec(model("bert-tiny").spec)
