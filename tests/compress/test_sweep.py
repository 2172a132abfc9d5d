"""The two solvers against slow, obvious references in double precision, and what must hold of them always."""

import pytest
import torch

from ridgeline.runtime.solve.grid import Affine, TernaryGrid, nearest
from ridgeline.runtime.solve.statistics import Gram
from ridgeline.runtime.solve.support import NM, Given, Unstructured
from ridgeline.runtime.solve.sweep import relative_error, sweep, sweep_stack
from ridgeline.techniques.quantization.quantease_torch import descend


def layer(out, width, rows=None, seed=0, dtype=torch.float32):
    """(W, H): a weight, and the second moments of inputs whose channels differ in size and depend on each other."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=draw, dtype=dtype)
    mix = torch.randn(width, width, generator=draw, dtype=dtype) / width**0.5 + torch.eye(width, dtype=dtype)
    x = torch.randn(rows or 4 * width, width, generator=draw, dtype=dtype) @ mix
    x *= torch.logspace(-1, 1, width, dtype=dtype)
    return weight, 2 / len(x) * x.t() @ x


def error(weight, found, gram):
    """tr((W - Q) H (W - Q)ᵀ) by its definition."""
    d = (weight - found).double()
    return float(torch.trace(d @ gram.double() @ d.t()))


def optimal_brain(weight, gram, snap):
    """Columns from the left: each is snapped, and the best change of all free ones is made, by an explicit inverse."""
    w = weight.clone()
    for j in range(w.shape[1]):
        inverse = torch.linalg.inv(gram[j:, j:])
        q = snap(w[:, j], j)
        w[:, j:] -= torch.outer((w[:, j] - q) / inverse[0, 0], inverse[0])
        w[:, j] = q
    return w


@pytest.mark.parametrize("block", [1, 4, 128])
def test_the_sweep_is_the_optimal_brain_surgeon_in_order(block):
    weight, gram = layer(5, 6, dtype=torch.float64)
    fitted = Affine(3).fit(weight)

    def snap(x, j):
        out = torch.empty_like(x)
        fitted.snap(x, j, out)
        return out

    found = sweep(weight, gram, fitted, damp=0.0, block=block)
    torch.testing.assert_close(found.weight, optimal_brain(weight, gram, snap), rtol=1e-9, atol=1e-9)
    assert found.damp == 0


def test_one_dropped_weight_moves_the_others_as_in_closed_form():
    """w - w_0 / [H⁻¹]_00 · H⁻¹[:, 0]: the optimal brain surgeon's update (Hassibi and Stork 1993)."""
    weight, gram = layer(4, 8, dtype=torch.float64)
    mask = torch.ones(4, 8, dtype=torch.bool)
    mask[:, 0] = False
    found = sweep(weight, gram, support=Given(mask), damp=0.0).weight
    inverse = torch.linalg.inv(gram)
    wanted = weight - torch.outer(weight[:, 0] / inverse[0, 0], inverse[0])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("symmetric", [True, False])
def test_without_second_moments_it_is_round_to_nearest(symmetric):
    weight, _ = layer(16, 64)
    fitted = Affine(3, 32, symmetric).fit(weight)
    assert torch.equal(sweep(weight, torch.eye(64), fitted, damp=0.0).weight, nearest(weight, fitted))


def test_the_order_of_inputs_does_not_matter_when_they_are_visited_by_activity():
    weight, gram = layer(8, 32, dtype=torch.float64)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    grid = Affine(3)
    there = sweep(weight, gram, grid.fit(weight), act_order=True).weight
    permuted = weight[:, order]
    here = sweep(permuted, gram[order][:, order], grid.fit(permuted), act_order=True).weight
    torch.testing.assert_close(here, there[:, order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_sweeps_beat_rounding_and_the_descent_beats_the_sweep(bits):
    weight, gram = layer(32, 64)
    grid = Affine(bits, 32)
    fitted = grid.fit(weight)
    solved = sweep(weight, gram, fitted, act_order=True).weight
    descended = descend(weight, gram, grid, solved).weight
    assert error(weight, solved, gram) < 0.5 * error(weight, nearest(weight, fitted), gram)
    assert error(weight, descended, gram) <= error(weight, solved, gram) * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("masked", [False, True])
def test_no_pass_of_the_descent_raises_the_error(seed, masked):
    weight, gram = layer(16, 48, seed=seed)
    grid, keep = Affine(2, 16), None
    if masked:
        keep = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) > 0.5
        weight = weight * keep
    start = sweep(weight, gram, grid.fit(weight), None if keep is None else Given(keep)).weight
    found = descend(weight, gram, grid, start, keep, passes=6)
    assert all(b <= a * (1 + 1e-5) for a, b in zip(found.errors, found.errors[1:], strict=False))
    assert found.errors[-1] < found.errors[0]
    assert found.errors[-1] == pytest.approx(error(weight, found.weight, gram), rel=1e-3)
    assert keep is None or bool((found.weight[~keep] == 0).all())


def test_a_step_of_the_descent_is_the_best_value_on_the_grid():
    """One pass against trying all values of one weight, the others standing."""
    weight, gram = layer(1, 5, dtype=torch.float64)
    grid = Affine(2)
    fitted = grid.fit(weight)
    start = nearest(weight, fitted)
    found = descend(weight, gram, grid, start, passes=1).weight
    levels = (torch.arange(4) - 2) * float(fitted.scale)
    slow = start.clone()
    for j in torch.argsort(gram.diagonal(), descending=True):
        trials = slow.repeat(4, 1)
        trials[:, j] = levels
        slow = trials[min(range(4), key=lambda i: error(weight, trials[i : i + 1], gram))].unsqueeze(0)
    torch.testing.assert_close(found, slow)


@pytest.mark.parametrize("structured", [False, True])
def test_outliers_lower_the_error_and_leave_the_rest_on_few_levels(structured):
    weight, gram = layer(24, 64)
    weight[:, 7] *= 20
    plain = descend(weight, gram, Affine(3), passes=8)
    found = descend(weight, gram, Affine(3), passes=8, outliers=1 / 64, structured=structured)
    assert error(weight, found.weight, gram) < 0.5 * error(weight, plain.weight, gram)
    assert max(len(row.unique()) for row in found.on_grid) <= 8
    assert len(found.outliers.index) == 24
    packed = found.fitted.pack(found.on_grid, found.outliers)
    torch.testing.assert_close(packed.dense(), found.weight, rtol=0, atol=1e-3)


def test_masked_weights_are_no_outliers():
    weight, gram = layer(16, 32)
    keep = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) > 0.5
    found = descend(weight * keep, gram, Affine(3), keep=keep, outliers=0.05)
    assert bool((found.weight[~keep] == 0).all())


@pytest.mark.parametrize("rows", [6, 500])
def test_dead_inputs_get_no_weight(rows):
    weight, gram = layer(8, 16, rows)
    gram[3], gram[:, 3] = 0, 0
    fitted = Affine(4).fit(weight)
    assert bool((sweep(weight, gram, fitted, act_order=True).weight[:, 3] == 0).all())
    assert bool((descend(weight, gram, Affine(4)).weight[:, 3] == 0).all())


def test_a_singular_h_is_damped_and_an_unusable_one_is_said():
    weight, gram = layer(8, 16, rows=3)  # rank 3
    fitted = Affine(4).fit(weight)
    damped = sweep(weight, gram, fitted, act_order=True)
    assert damped.damp == pytest.approx(0.01)
    assert error(weight, damped.weight, gram) <= error(weight, nearest(weight, fitted), gram)
    plain = sweep(weight, gram - 0.1 * gram.diagonal().mean() * torch.eye(16), fitted, damp=0.0)  # not even positive
    assert plain.damp == float("inf")
    assert torch.equal(plain.weight, nearest(weight, fitted))


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.7])
def test_unstructured_sparsity_is_exact_in_every_block(sparsity):
    weight, gram = layer(10, 64)
    keep = sweep(weight, gram, support=Unstructured(sparsity), block=16).keep
    for block in keep.split(16, dim=1):
        assert int((~block).sum()) == round(sparsity * 160)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8), (1, 4)])
def test_n_of_m_is_exact_in_every_group(n, m):
    weight, gram = layer(10, 64)
    found = sweep(weight, gram, support=NM(n, m), block=32)
    assert bool(((~found.keep).view(10, -1, m).sum(-1) == n).all())
    assert bool((found.weight[~found.keep] == 0).all())


def test_a_grid_keeps_a_given_support():
    weight, gram = layer(16, 64)
    pruned = sweep(weight, gram, support=Unstructured(0.5))
    joint = sweep(pruned.weight, gram, Affine(4, 32).fit(pruned.weight), Given(pruned.keep), act_order=True)
    assert bool((joint.weight[~pruned.keep] == 0).all())
    assert relative_error(pruned.weight, joint.weight, gram) < 0.05


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize(
    ("grid", "pruned"), [(Affine(2, symmetric=False), True), (TernaryGrid(), False), (TernaryGrid(), True)]
)
def test_problems_side_by_side_are_solved_as_one_by_one(grid, pruned, order):
    """One has no use for its inputs' moments, one's H cannot be factored: that stays theirs. Products are summed in
    another order, so a weight may fall to the other side of a threshold: one in a thousand."""
    pairs = [layer(40, 160, seed=seed) for seed in range(5)]
    weights, grams = torch.stack([w for w, _ in pairs]), [h for _, h in pairs]
    grams[1] = torch.eye(160)
    grams[2] = grams[2] - 1e6 * torch.eye(160)
    grams[3][:, 7] = grams[3][7] = 0
    mask = torch.rand(weights.shape, generator=torch.Generator().manual_seed(9)) > 0.5
    support = Given(mask.flatten(0, 1)) if pruned else None
    together = sweep_stack(weights, grams, grid.fit(weights.flatten(0, 1)), support, order, block=64)
    alone = [sweep(w, h, grid.fit(w), Given(m) if pruned else None, order, block=64)
             for w, h, m in zip(weights, grams, mask, strict=True)]  # fmt: skip
    for found, expected in zip(together, alone, strict=True):
        assert found.damp == expected.damp
        assert (found.weight != expected.weight).float().mean() < 1e-3
        assert (found.keep is None and expected.keep is None) or torch.equal(found.keep, expected.keep)
    assert [s.damp for s in together] == [0.01, 0.01, float("inf"), 0.01, 0.01]
    assert bool((together[3].weight[:, 7] == 0).all())


def test_groups_of_columns_side_by_side():
    """In the columns' own order; in another, each problem would be at another group."""
    weights, grams = (torch.stack(x) for x in zip(*(layer(16, 64, seed=seed) for seed in range(3)), strict=True))
    fitted = Affine(3, 16).fit(weights.flatten(0, 1))
    for found, weight, gram in zip(sweep_stack(weights, grams, fitted), weights, grams, strict=True):
        assert (found.weight != sweep(weight, gram, Affine(3, 16).fit(weight)).weight).float().mean() < 1e-3
    with pytest.raises(AssertionError):
        sweep_stack(weights, grams, fitted, act_order=True)


@pytest.mark.parametrize("width", [1, 130, 600])
def test_second_moments(width):
    """Of rows that come in chunks of any size, though only blocks up to the diagonal are summed."""
    rows = torch.randn(150, width, generator=torch.Generator().manual_seed(0))
    gram = Gram(width)
    for chunk in (rows[:100].view(2, 50, width), rows[100:100], rows[100:].bfloat16()):
        gram.add(chunk)
    seen = torch.cat((rows[:100], rows[100:].bfloat16().float())).double()
    torch.testing.assert_close(gram.value.double(), 2 / 150 * seen.T @ seen, rtol=1e-5, atol=1e-5)
    assert torch.equal(gram.value, gram.value.T)
