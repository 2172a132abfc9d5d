"""The arena's planner: no two live tensors overlap, and the arena is between the bound and the naive sum."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.nn.memory.arena import ALIGNMENT, lower_bound, offsets, padded, writer_of

SPANS = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 40), st.integers(1, 20)).map(lambda s: (s[0], s[1], s[1] + s[2])),
    max_size=40,
)


def assert_apart(spans, where):
    for i, (size, birth, death) in enumerate(spans):
        assert where[i] % ALIGNMENT == 0
        for j in range(i):
            if birth < spans[j][2] and spans[j][1] < death:
                assert where[i] + size <= where[j] or where[j] + spans[j][0] <= where[i], (spans[i], spans[j])


@given(SPANS)
def test_live_tensors_never_overlap(spans):
    where, total = offsets(spans)
    assert_apart(spans, where)
    assert total == max((w + padded(s[0]) for w, s in zip(where, spans, strict=True)), default=0)
    assert lower_bound(spans) <= total <= sum(padded(s[0]) for s in spans)


def test_the_lower_bound_is_the_most_that_lives_at_once():
    spans = [(64, 0, 2), (128, 1, 3), (64, 2, 4)]
    assert lower_bound(spans) == 192
    assert offsets(spans)[1] == 192
    assert lower_bound([]) == 0 == offsets([])[1]


def test_tensors_that_follow_each_other_share_a_place():
    where, total = offsets([(100, i, i + 1) for i in range(50)])
    assert set(where) == {0}
    assert total == 128


def test_nested_lifetimes_of_a_network_need_no_more_than_the_bound():
    spans = [(64 * (1 + i % 7), i, 200 - i) for i in range(100)]
    assert offsets(spans)[1] == lower_bound(spans)


def test_a_thousand_tensors_are_planned_near_the_bound():
    rng = np.random.default_rng(0)
    births = rng.integers(0, 3000, 1000)
    spans = [
        (int(s), int(b), int(b + d))
        for s, b, d in zip(rng.integers(64, 1e6, 1000), births, rng.integers(1, 600, 1000), strict=True)
    ]
    where, total = offsets(spans)
    print(f"{total / lower_bound(spans):.3f} of the bound")
    assert total <= 1.15 * lower_bound(spans)
    assert_apart(spans[:200], where[:200])


@pytest.mark.parametrize(
    ("op", "covered"),
    [
        (torch.ops.aten.mm.default, True),
        (torch.ops.aten.mul.Tensor, True),
        (torch.ops.aten.add.Tensor, True),
        (torch.ops.aten._softmax.default, True),
        (torch.ops.aten.clone.default, True),
        (torch.ops.aten.embedding.default, False),  # its out= variant allocates a result and copies it
        (torch.ops.aten.native_layer_norm.default, False),
        (torch.ops.aten.mul_.Tensor, False),
        (torch.ops.aten.view.default, False),
    ],
)
def test_only_kernels_that_write_in_place_are_covered(op, covered):
    assert (writer_of(op, "CPU") is not None) == covered
