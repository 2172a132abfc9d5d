"""Products of a few rows in Triton (its interpreter, where there is no GPU), and which products they are."""

import pytest
import torch
import torch.nn.functional as F
from tests.nn.interpreter import DEVICE

from ridgeline.nn.kernels import products, skinny
from ridgeline.nn.quant import codec
from ridgeline.nn.quant.codes import counters
from ridgeline.spec.lowbit import MANY_ROWS
from ridgeline.techniques.precision import fp8_linear_torch as fp8

E4M3 = torch.float8_e4m3fn


def operands(m, n, k, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(m + n)
    return [torch.randn(*s, generator=g).to(DEVICE, dtype) for s in ((m, k), (n, k), (n,))]


def coded(m, n, k):
    """Codes of both operands with scales for their rows."""
    x, w, bias = operands(m, n, k)
    g = torch.Generator().manual_seed(k)
    scales = [(2.0 ** torch.randint(-3, 3, (rows, 1), generator=g)).to(DEVICE) for rows in (m, n)]
    return x.to(E4M3), scales[0], w.to(E4M3), scales[1] * 1.25, bias


def near(got, x, w, bias, part=2.0**-20):
    """One rounding of the result, which the interpreter truncates, beside sums that are ``part`` of all they add."""
    want, added = (F.linear(*given) for given in ((x, w, bias), (x.abs(), w.abs(), bias.abs())))
    eps = torch.finfo(got.dtype).eps
    return bool(((got.double() - want).abs() <= eps * want.abs() + part * added).all())


def launch(m, split):
    how = next(h for h in skinny.LAUNCHES if m <= h.rows)
    return how if split else how._replace(programs=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(2, 64, 1024), (9, 70, 528), (16, 129, 16), (33, 130, 272), (64, 128, 256),
                                           (128, 65, 400)])  # fmt: skip
@pytest.mark.parametrize("split", [False, True])
def test_codes_are_multiplied_as_they_are(dtype, m, n, k, split):
    x, x_scales, w, scales, bias = coded(m, n, k)
    given = x, x_scales, w, scales, counters(n, x.device), dtype, bias if split else None, launch(m, split)
    got = skinny.product_of_coded_rows(*given)
    assert (got.shape, got.dtype) == ((m, n), dtype)
    # Hopper's tensor cores cut each product to 13 bits or more below the largest of those that they add at a time
    # (arXiv:2412.19437, section 3.5.2), which is no more than 16 times the mean of such numbers.
    part = 2.0**-20 if DEVICE == "cpu" else 2.0**-9
    both = x.double() * x_scales.double(), w.double() * scales.double()
    assert near(got, *both, bias.double() if split else bias.double() * 0, part)
    assert torch.equal(got, skinny.product_of_coded_rows(*given))
    assert not given[4].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(2, 64, 1024), (9, 70, 264), (16, 129, 8), (33, 130, 136), (64, 128, 128),
                                           (128, 65, 200)])  # fmt: skip
@pytest.mark.parametrize("split", [False, True])
def test_products_in_16_bits(dtype, m, n, k, split):
    x, w, bias = operands(m, n, k, dtype)
    arrived = counters(n, x.device)
    given = x, w, arrived, bias if split else None, launch(m, split)
    got = skinny.product_of_rows(*given)
    assert (got.shape, got.dtype) == ((m, n), dtype)
    assert near(got, x.double(), w.double(), bias.double() if split else bias.double() * 0)
    assert torch.equal(got, skinny.product_of_rows(*given))
    assert not arrived.any()


def product(x, x_scales, w, scales, bias, how=None):
    return skinny.product_of_coded_rows(x, x_scales, w, scales, counters(len(w), x.device), torch.bfloat16, bias, how)


@pytest.mark.parametrize("split", [False, True])
def test_a_row_depends_on_no_other(split):
    """Neither on what the others hold nor on how many there are, as far as a launch is the same."""
    x, x_scales, *weight = coded(8, 70, 272)
    whole = product(x, x_scales, *weight, launch(8, split))
    changed = torch.cat([x[:5], x[5:].flip(0)])
    for few in (product(x[:5].clone(), x_scales[:5].clone(), *weight, launch(8, split)),
                product(changed, x_scales, *weight, launch(8, split))):  # fmt: skip
        assert torch.equal(few[:5], whole[:5])


def test_how_inputs_are_split_depends_on_the_weight(monkeypatch):
    """All rows of a range have as many programs; those of one weight are at most what is asked for."""
    grids = []
    kernel = skinny._product_of_rows

    class Seen:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(skinny, "_product_of_rows", Seen())
    for how in skinny.LAUNCHES:
        grids.clear()
        for m in (how.rows // 2 + 1, how.rows):
            product(*coded(m, 200, 2048))
        assert grids[0] == grids[1]
        tiles, splits = grids[0]
        assert (tiles, 1 < splits <= 2048 // how.bytes) == (-(-200 // how.outputs), True)


@pytest.fixture
def found(monkeypatch):
    """Rows that the kernel multiplied as on Hopper, of layers on any device."""
    rows, plain = [], skinny.product_of_coded_rows

    def count(x, *more):
        rows.append(len(x))
        return plain(x, *more)

    for name in ("_for_triton", "is_hopper"):
        monkeypatch.setattr(products, name, lambda *_: True)
    monkeypatch.setattr(skinny, "product_of_coded_rows", count)
    return rows


@pytest.mark.parametrize("biased", [False, True])
def test_which_float8_products_it_is(biased, found, monkeypatch):
    """More rows than those that are not rounded; results as PyTorch's product in float8 has them by definition."""
    for module in (fp8, products):
        monkeypatch.setattr(module, "has_float8", lambda device: True)
    assert MANY_ROWS == skinny.MOST
    x, w, bias = operands(MANY_ROWS + 1, 48, 80)
    layer = torch.nn.Linear(80, 48, bias=biased, device=DEVICE, dtype=torch.bfloat16)
    layer.weight.data.copy_(w)
    if biased:
        layer.bias.data.copy_(bias)
    stored = fp8.StoredFp8Linear(layer.requires_grad_(False))
    with torch.inference_mode():
        for m in (8, 9, MANY_ROWS, MANY_ROWS + 1):
            y = stored(x[None, :m])
            assert (y.shape, y.dtype) == ((1, m, 48), torch.bfloat16)
            if 8 < m <= MANY_ROWS:
                read = codec.layouts(x[:m], E4M3, rowwise=True, transpose=False)
                both = (
                    read.rows.double() * read.inverse_scale.double(),
                    stored.codes.view(E4M3).double() * stored.inverse,
                )
                assert near(y[0], *both, bias.double() * biased, 2.0**-20 if DEVICE == "cpu" else 2.0**-9)
        assert found == [9, MANY_ROWS]
        assert not stored.arrived.any()
        stored(x[:9].float())  # whose results have 32 bits
        if DEVICE == "cpu":  # a GPU's library has no such products, either
            odd = torch.nn.Linear(80, 40, bias=False, dtype=torch.bfloat16)
            fp8.StoredFp8Linear(odd)(x[:9])
        monkeypatch.setattr(products, "is_hopper", lambda *_: False)
        stored(x[:9])
    assert found == [9, MANY_ROWS]
