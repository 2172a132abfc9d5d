"""Batches by length: the cheapest of all partitions, a cost table without surprises, and a queue where nobody waits
behind those that came later."""

from collections import deque
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.serving import ask, engine, greedy, model, run

from ridgeline.runtime.batch_order import CostOrderedBatches, CostTable, free
from ridgeline.serve.batching import measure_costs
from ridgeline.serve.request import EngineRequest
from ridgeline.serve.sequence import Sequence, SequenceGroup
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.scheduling import Limits
from ridgeline.techniques.serving.length_dp import dp_batches
from ridgeline.techniques.serving.multi_adapter import two_stage_batches

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=9)


def partitions(items):
    """All ways to divide ``items`` into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        for i, group in enumerate(rest):
            yield [*rest[:i], [items[0], *group], *rest[i + 1 :]]
        yield [[items[0]], *rest]


@st.composite
def monotone_costs(draw):
    """Any cost that does not fall with the length: by batch size a staircase over the lengths."""
    steps = draw(st.lists(st.lists(st.integers(0, 9), min_size=13, max_size=13), min_size=10, max_size=10))
    table = [[sum(row[: i + 1]) for i in range(len(row))] for row in steps]
    return lambda length, batch: table[batch][length]


@given(LENGTHS, monotone_costs())
def test_no_partition_is_cheaper(lengths, cost):
    def total(batches):
        return sum(cost(max(lengths[i] for i in b), len(b)) for b in batches)

    found = dp_batches(lengths, cost)
    assert sorted(i for b in found for i in b) == list(range(len(lengths)))
    lengths_of = [[lengths[i] for i in b] for b in found]
    assert all(max(a) <= min(b) for a, b in pairwise(lengths_of))
    everything = range(len(lengths))
    assert total(found) == min(total(p) for p in partitions(list(everything)))


def test_what_is_too_large_is_cut():
    def cost(length, batch):
        return float("inf") if length * batch > 20 and batch > 1 else 1.0

    assert [len(b) for b in dp_batches([10] * 5, cost)] in ([2, 2, 1], [1, 2, 2], [2, 1, 2])
    assert dp_batches([30], cost) == [[0]]
    assert dp_batches([], cost) == []


@given(st.dictionaries(st.tuples(st.sampled_from([1, 4, 16]), st.sampled_from([1, 4])), st.floats(1e-4, 1.0)))
def test_the_table_holds_what_was_measured_and_never_falls(measured):
    measured |= {(length, 1): measured.get((length, 1), 0.01) for length in (1, 4, 16)}
    table = CostTable(measured)
    for length in (1, 4, 16):
        for batch in (1, 4):
            assert table(length, batch) >= measured.get((length, batch), 0)
    seconds = [[table(length, batch) for batch in range(1, 9)] for length in range(1, 33)]
    for some in (*seconds, *zip(*seconds, strict=True)):
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(some))


def waiting(*lengths):
    return deque(Sequence(SequenceGroup(EngineRequest("", [0] * n), 0), i, [0] * n) for i, n in enumerate(lengths))


def test_a_cut_queue_is_served_whole_before_later_arrivals_and_the_oldest_first():
    def cost(length, batch):  # like lengths go together
        return length * batch + 3

    policy = CostOrderedBatches(
        lambda lengths, tasks, shared, own: dp_batches(lengths, shared), Limits(), cost, free, lambda s: (s.total, "")
    )
    queue = waiting(50, 2, 51, 3, 2)
    assert policy(queue) == 2
    assert [s.index for s in queue][:2] == [0, 2]
    first, second = queue.popleft(), queue.popleft()
    assert {first.index, second.index} == {0, 2}
    late = waiting(2)[0]
    queue.append(late)
    assert policy(queue) == 3
    assert late not in list(queue)[:3]
    queue.remove(next(s for s in queue if s is not late))  # cancelled meanwhile
    assert policy(queue) == 2
    for _ in range(2):
        queue.popleft()
    assert policy(queue) == 1
    assert queue[0] is late
    queue.clear()
    assert policy(queue) == 0


def test_the_table_is_measured_and_leaves_nothing_in_the_pool():
    eng = engine(model(), "-padding_free", "length_dp", max_num_batched_tokens=64)
    assert eng.blocks.used == 0
    eng.check()
    table = eng.scheduler.order.shared
    assert table.lengths == [1, 4, 16, 64]
    assert table(1, 1) > 0
    again = measure_costs(eng.runner, eng.blocks, eng.limits, eng.max_model_len)
    assert again.lengths == table.lengths


@pytest.mark.parametrize("plan", [(), ("-continuous_batching",), ("-paged_kv", "-chunked_prefill")])
def test_generated_tokens_stay_the_same(plan):
    made = model()
    prompts = {f"r{i}": [(5 * i + j) % 300 for j in range(1 + 17 * i % 40)] for i in range(9)}
    eng = engine(made, "-padding_free", "length_dp", *plan, max_num_batched_tokens=96)
    got, _ = run(eng, *[ask(k, p, 5) for k, p in prompts.items()])
    assert got == {(k, 0): greedy(made, p, 5) for k, p in prompts.items()}


def test_an_encoders_batches_are_the_cut_ones():
    made = model("bert-tiny")
    eng = engine(made, "-padding_free", "length_dp", max_num_batched_tokens=256)
    eng.scheduler.order.shared = lambda length, batch: length * batch + 3
    for i, n in enumerate((60, 3, 61, 4, 3)):
        eng.add(EngineRequest(str(i), [1 + i] * n, embed=True))
    steps = []
    while eng.has_work():
        steps.append({e.request: e.embedding for e in eng.step()})
    assert [set(s) for s in steps] == [{"0", "2"}, {"1", "3", "4"}]
    with torch.inference_mode():
        alone = made(torch.tensor([[4] * 4]), return_hidden=True)[0].mean(0)
    torch.testing.assert_close(torch.tensor(steps[1]["3"]).to(alone), alone, rtol=1e-6, atol=1e-7)


def test_packed_batches_have_nothing_to_save():
    with pytest.raises(Incompatible, match="no pads"):
        engine(model(), "length_dp")


# ---- several tasks ---------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from(["", "a", "b"])), min_size=1, max_size=8),
       monotone_costs(), monotone_costs())  # fmt: skip
def test_each_of_the_two_stages_is_the_cheapest(asked, shared, own):
    lengths, tasks = [n for n, _ in asked], [t for _, t in asked]
    found = two_stage_batches(lengths, tasks, shared, own)
    assert sorted(i for b in found for i in b) == list(range(len(asked)))
    small = []
    for task in dict.fromkeys(tasks):
        mine = [i for i, t in enumerate(tasks) if t == task]
        ways = list(partitions(mine)) if task else [[[i] for i in mine]]
        costs = [sum(own(max(lengths[i] for i in b), len(b)) for b in way) for way in ways]
        made = dp_batches([lengths[i] for i in mine], own) if task else [[i] for i in range(len(mine))]
        cost = sum(own(max(lengths[mine[i]] for i in b), len(b)) for b in made)
        assert cost == min(costs)
        small += [[mine[i] for i in b] for b in made]
    small.sort(key=lambda b: max(lengths[i] for i in b))

    def seconds(group):
        longest = max(lengths[i] for b in group for i in b)
        return shared(longest, sum(map(len, group))) + sum(own(longest, len(b)) for b in group if tasks[b[0]])

    cuts = range(2 ** (len(small) - 1))
    ways = []
    for cut in cuts:
        way = [[small[0]]]
        for k, batch in enumerate(small[1:]):
            if cut >> k & 1:
                way.append([batch])
            else:
                way[-1].append(batch)
        ways.append(sum(map(seconds, way)))
    groups = [[b for b in small if set(b) <= set(batch)] for batch in found]
    assert sum(map(seconds, groups)) == min(ways)


def test_two_stages_in_the_engine():
    made = model()
    eng = engine(made, "-padding_free", "multi_adapter:two_stage=true", max_num_batched_tokens=128)
    policy = eng.scheduler.order
    assert policy.own(64, 1) >= 0
    assert not eng.adapters.tasks.tasks
    eng.check()
    prompts = {f"r{i}": [(5 * i + j) % 300 for j in range(1 + 17 * i % 40)] for i in range(9)}
    got, _ = run(eng, *[ask(k, p, 5) for k, p in prompts.items()])
    assert got == {(k, 0): greedy(made, p, 5) for k, p in prompts.items()}
    with pytest.raises(Incompatible, match="two_stage"):
        engine(made, "multi_adapter:two_stage=true")
    with pytest.raises(Incompatible, match="order of the queue"):
        engine(made, "-padding_free", "length_dp", "multi_adapter:two_stage=true")
