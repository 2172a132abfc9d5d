"""Any requests, cancels, adapters, pools, features: invariants after every step, the reference's tokens at the end."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.serving import ADAPTERS, adapted, adapters_in, alone, ask, beams_alone, engine, model

from ridgeline.serve.request import Invalid

ENDS = (7, 11, 23)
BLOCK = 4 * 2 * 2 * 2 * 8 * 8


FOLDERS, SIZES = {}, {}
"""Adapters by kind, and the bytes that each takes of a pool."""


@pytest.fixture(scope="module", autouse=True)
def _adapters(tmp_path_factory):
    FOLDERS.update(adapters_in(tmp_path_factory.mktemp("adapters")))
    eng = engine(model(), "multi_adapter", "paged_kv:block_size=4")
    for kind, folder in FOLDERS.items():
        before = eng.blocks.borrowed
        eng.load_adapter(kind, folder)
        SIZES[kind] = (eng.blocks.borrowed - before) * BLOCK


@cache
def reference(kind):
    """The model with that adapter, or with none."""
    return adapted(FOLDERS[kind]) if kind else model()


NAMES = ("a", "b")
TASKS = st.integers(0, 2)
"""The base or one of two adapters, as far as they are loaded."""
KINDS = st.sampled_from([{}, {"top_k": 4}, {"top_p": 0.8}, {"frequency_penalty": 1.2}, {"min_p": 0.1}])
PROMPTS = st.one_of(
    st.lists(st.integers(0, 299), min_size=1, max_size=24),
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 299), min_size=1, max_size=5)).map(
        lambda t: [(t[0] + 5 * j) % 300 for j in range(13)] + t[1]  # prefixes in common
    ),
)


class Serving(RuleBasedStateMachine):
    """One engine with some subset of the techniques, and requests that come and go."""

    @initialize(
        paged=st.booleans(), share=st.booleans(), continuous=st.booleans(), chunked=st.booleans(),
        hierarchical=st.booleans(), drafts=st.booleans(), blocks=st.integers(16, 60), budget=st.integers(3, 40),
        seqs=st.integers(1, 6), rows=st.sampled_from([[], [], ["-padding_free"], ["-padding_free", "length_dp"]]),
        loaded=st.one_of(st.just([]), st.lists(st.sampled_from(list(ADAPTERS)), min_size=1, max_size=2)),
        two_stage=st.booleans(), ahead=st.booleans(),
    )  # fmt: skip
    def start(self, paged, share, continuous, chunked, hierarchical, drafts, blocks, budget, seqs, rows, loaded,
              two_stage, ahead):  # fmt: skip
        wanted = {"continuous_batching": continuous, "chunked_prefill": chunked, "hierarchical_search": hierarchical,
                  "paged_kv": paged}  # fmt: skip
        off = [f"-{name}" for name, on in wanted.items() if not on] + rows
        if paged:
            off.append(f"paged_kv:block_size=4,prefix_sharing={str(share).lower()}")
        if drafts:
            off.append("speculative:tokens=3")
        # Without pages a block has 16 slots.
        room = blocks * BLOCK if paged else max(4, blocks // 4) * 4 * BLOCK
        limits = {"max_num_batched_tokens": budget, "max_num_seqs": seqs}
        if loaded:
            off.append(f"multi_adapter:two_stage={str(two_stage and rows == ['-padding_free']).lower()}")
            limits["max_model_len"] = min(128, room // BLOCK * 4)
            room += sum(SIZES[kind] for kind in loaded) + len(loaded) * 4 * BLOCK
        self.engine = engine(model(), *off, ends=ENDS, kv_cache_bytes=room, **limits)
        if ahead:
            assert bool(self.engine.go_ahead()) == drafts
        self.asked, self.got, self.ended, self.count, self.tasks = {}, {}, {}, 0, {}
        for name, kind in zip(NAMES, loaded, strict=False):
            self.engine.load_adapter(name, FOLDERS[kind])
            self.tasks[name] = kind

    def _used(self, name):
        return any(g.request.adapter == name for g in self.engine.groups.values())

    def _add(self, prompt, new, task, **fields):
        self.count += 1
        new = min(new, self.engine.max_model_len - len(prompt))
        if new < 1:
            return
        name = NAMES[task - 1] if task and NAMES[task - 1] in self.tasks else ""
        r = replace(ask(f"q{self.count}", prompt, new, **fields), adapter=name)
        self.asked[r.id] = r, self.tasks.get(name, "")
        self.engine.add(r)

    @rule(prompt=PROMPTS, new=st.integers(1, 14), task=TASKS)
    def greedy(self, prompt, new, task):
        self._add(prompt, new, task)

    @rule(prompt=PROMPTS, new=st.integers(1, 10), task=TASKS, n=st.integers(1, 3), seed=st.integers(0, 9),
          kind=KINDS)  # fmt: skip
    def sampled(self, prompt, new, task, n, seed, kind):
        self._add(prompt, new, task, temperature=0.8, n=n, seed=seed, **kind)

    @rule(prompt=PROMPTS, new=st.integers(1, 6), task=TASKS, width=st.integers(1, 3))
    def beams(self, prompt, new, task, width):
        self._add(prompt, new, task, beam_width=width, n=width)

    @precondition(lambda self: self.engine.adapters is not None)
    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from(list(ADAPTERS)), wait=st.booleans())
    def exchange(self, name, kind, wait):
        """Another adapter under a name, unless somebody uses the old one or the pool has no room for the new one; it is
        asked what the old one was asked last, whose blocks may still lie in the cache."""
        if name in self.tasks:
            while wait and self._used(name):
                self.go(1)
            if self._used(name):
                with pytest.raises(Invalid, match="are using"):
                    self.engine.unload_adapter(name)
                return
            self.engine.unload_adapter(name)
            del self.tasks[name]
        try:
            self.engine.load_adapter(name, FOLDERS[kind])
        except Invalid:  # no room
            blocks = self.engine.blocks
            room = min(blocks.free, blocks.count - blocks.borrowed - blocks.needed(self.engine.max_model_len))
            assert SIZES[kind] > (room - 1) * BLOCK * blocks.size // 4
        else:
            self.tasks[name] = kind
            before = [r.prompt for r, _ in self.asked.values() if r.adapter == name]
            if before:
                self._add(before[-1], 5, NAMES.index(name) + 1)
        self.engine.check()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.asked)))
        if self.engine.abort(name):
            self.asked.pop(name)
            self.engine.check()

    @rule(steps=st.integers(1, 8))
    def go(self, steps):
        for _ in range(steps):
            for e in self.engine.step():
                self.got.setdefault((e.request, e.index), []).extend(e.tokens)
                if e.finish:
                    self.ended[e.request, e.index] = e.finish
            self.engine.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        left = 4000
        while self.engine.has_work() and left:
            self.go(1)
            left -= 1
        assert left, "it never ends"
        assert self.engine.blocks.used == 0
        self.engine.close()
        for name in self.tasks:
            self.engine.unload_adapter(name)
        assert self.engine.blocks.free == self.engine.blocks.count
        for name, (r, kind) in self.asked.items():
            if r.sampling.beam_width:
                expected = dict(enumerate(beams_alone(reference(kind), r, ENDS)))
            else:
                expected = alone(reference(kind), r, ENDS)
            assert {i: self.got[name, i] for i in expected} == expected
            assert all(self.ended[name, i] in ("stop", "length") for i in expected)


Serving.TestCase.settings = settings(
    stateful_step_count=14, deadline=None, derandomize=True,  # examples: tests/conftest.py
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
TestServing = Serving.TestCase
