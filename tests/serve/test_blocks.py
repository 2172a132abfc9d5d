"""The block manager: extents, copy-on-write, what is evicted first."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.serve.block_manager import Blocks, runs
from ridgeline.serve.request import EngineRequest
from ridgeline.serve.sequence import Sequence, SequenceGroup


def seq(tokens, salt=b""):
    return Sequence(SequenceGroup(EngineRequest("r", tokens), 0, scope=salt), 0, list(tokens))


def compute(blocks, s, n=None, expect=0):
    """Give a sequence blocks for all its tokens and call them computed."""
    copies = blocks.grow(s, n or len(s.tokens), expect)
    assert copies is not None
    s.n_computed = n or len(s.tokens)
    blocks.commit(s)
    return copies


def test_a_sequence_grows_in_one_extent_beside_others():
    blocks = Blocks(64, 4)
    some = [seq(range(10 * i, 10 * i + 5)) for i in range(3)]
    for s in some:
        compute(blocks, s, expect=40)
    for _ in range(30):
        for s in some:
            s.tokens.append(1)
            compute(blocks, s)
    assert [len(runs(s.blocks, 4, 0, len(s.tokens))) for s in some] == [1, 1, 1]
    blocks.check(some)


def test_runs_cover_a_table():
    assert runs([3, 4, 9, 1], 4, 2, 15) == [(14, 6), (36, 4), (4, 3)]
    assert runs([3], 4, 0, 0) == []


def test_the_first_to_write_copies():
    blocks = Blocks(16, 4)
    parent = seq(range(6))
    compute(blocks, parent)
    child = seq(range(6))
    blocks.fork(parent, child)
    assert child.blocks == parent.blocks
    child.tokens.append(9)
    ((source, target),) = compute(blocks, child)
    assert source == parent.blocks[1]
    assert target == child.blocks[1]
    assert child.blocks[0] == parent.blocks[0]
    parent.tokens.append(8)
    assert compute(blocks, parent) == []
    blocks.check([parent, child])


def test_the_least_recently_freed_tail_is_evicted_first():
    blocks = Blocks(4, 2)
    old, new = seq([1, 2, 3, 4, 0]), seq([5, 6, 7, 8])
    compute(blocks, old, 4)
    blocks.release(old)
    compute(blocks, new, 4)
    blocks.release(new)
    other = seq([9, 9])
    compute(blocks, other)
    again = seq([1, 2, 3, 4, 0])
    assert blocks.match(again) == 2  # its second block went, its first is still there
    blocks.check([other, again])


def test_the_last_token_is_always_left_to_compute():
    blocks = Blocks(8, 4)
    first = seq(range(8))
    compute(blocks, first)
    second = seq(range(8))
    assert blocks.match(second) == 4


def test_a_salt_separates():
    blocks = Blocks(8, 4)
    compute(blocks, seq(range(9)))
    assert blocks.match(seq(range(9), salt=b"x")) == 0
    assert blocks.match(seq(range(9))) == 8


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 9)), max_size=60), st.integers(3, 20))
def test_no_block_is_ever_lost(acts, count):
    blocks, alive = Blocks(count, 4), []
    for act, which, n in acts:
        if act == 0 or not alive:
            s = seq([which] * (n + 1))
            found = blocks.find(s)
            assert blocks.match(s) == found
            alive.append(s)
        s = alive[which % len(alive)]
        if act in (1, 2):
            s.tokens += [n] * n
            if blocks.grow(s, len(s.tokens)) is None:
                blocks.release(s)
                alive.remove(s)
            else:
                s.n_computed = len(s.tokens)
                blocks.commit(s)
        elif act == 3:
            child = seq(s.tokens)
            blocks.fork(s, child)
            alive.append(child)
        elif act == 4:
            blocks.release(s)
            alive.remove(s)
        blocks.check(alive)
    for s in alive:
        blocks.release(s)
    blocks.check([])
    assert blocks.free == count
