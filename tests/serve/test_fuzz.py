"""Any requests, cancels, pools and features: invariants after every step, the reference's tokens at the end."""

from functools import cache

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.serving import alone, ask, beams_alone, engine, model

ENDS = (7, 11, 23)
BLOCK = 4 * 2 * 2 * 2 * 8 * 8


@cache
def llama():
    return model()


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
        seqs=st.integers(1, 6),
    )  # fmt: skip
    def start(self, paged, share, continuous, chunked, hierarchical, drafts, blocks, budget, seqs):
        wanted = {"continuous_batching": continuous, "chunked_prefill": chunked, "hierarchical_search": hierarchical,
                  "paged_kv": paged}  # fmt: skip
        off = [f"-{name}" for name, on in wanted.items() if not on]
        if paged:
            off.append(f"paged_kv:block_size=4,prefix_sharing={str(share).lower()}")
        if drafts:
            off.append("speculative:tokens=3")
        # Without pages a block has 16 slots.
        room = blocks * BLOCK if paged else max(4, blocks // 4) * 4 * BLOCK
        self.engine = engine(llama(), *off, ends=ENDS, kv_cache_bytes=room, max_num_batched_tokens=budget,
                             max_num_seqs=seqs)  # fmt: skip
        self.asked, self.got, self.ended, self.count = {}, {}, {}, 0

    def _add(self, prompt, new, **fields):
        self.count += 1
        new = min(new, self.engine.max_model_len - len(prompt))
        if new < 1:
            return
        r = ask(f"q{self.count}", prompt, new, **fields)
        self.asked[r.id] = r
        self.engine.add(r)

    @rule(prompt=PROMPTS, new=st.integers(1, 14))
    def greedy(self, prompt, new):
        self._add(prompt, new)

    @rule(prompt=PROMPTS, new=st.integers(1, 10), n=st.integers(1, 3), seed=st.integers(0, 9),
          kind=KINDS)  # fmt: skip
    def sampled(self, prompt, new, n, seed, kind):
        self._add(prompt, new, temperature=0.8, n=n, seed=seed, **kind)

    @rule(prompt=PROMPTS, new=st.integers(1, 6), width=st.integers(1, 3))
    def beams(self, prompt, new, width):
        self._add(prompt, new, beam_width=width, n=width)

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
        for name, r in self.asked.items():
            if r.sampling.beam_width:
                expected = dict(enumerate(beams_alone(llama(), r, ENDS)))
            else:
                expected = alone(llama(), r, ENDS)
            assert {i: self.got[name, i] for i in expected} == expected
            assert all(self.ended[name, i] in ("stop", "length") for i in expected)


Serving.TestCase.settings = settings(
    max_examples=120, stateful_step_count=14, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
TestServing = Serving.TestCase
