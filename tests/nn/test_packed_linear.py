"""Layers that compute from codes, against the expanded weight in fp64."""

import pytest
import torch
import torch.nn.functional as F

from ridgeline.nn.quant import packed_linear
from ridgeline.nn.quant.activation_quant import InputCode, code_input
from ridgeline.nn.quant.packed import Packed, PackedOutliers
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.lowbit import FEW_NIBBLES, held, held_bytes

SHAPES = [(96, 128, 32), (112, 256, 256), (64, 64, 64), (24, 96, 32), (16, 96, 8), (7, 10, 10)]


def record(out, width, bits, group, symmetric, seed=0, outliers=0):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << bits, (out, width), generator=g, dtype=torch.int32).to(torch.uint8)
    scale = (torch.rand(out, width // group, generator=g) * 0.02 + 0.01).half()
    zero = None
    if not symmetric:
        zero = torch.randint(1 << bits, (out, width // group), generator=g, dtype=torch.int32).to(torch.uint8)
    aside = None
    if outliers:
        index = torch.randperm(out * width, generator=g)[:outliers].sort().values.int()
        aside = PackedOutliers(index, torch.randn(outliers, generator=g).half())
    return Packed(codes, scale, zero, bits, group, aside)


def rows(m, width, seed=1):
    return torch.randn(m, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_form_is_the_expanded_weight(bits, symmetric):
    for out, width, group in SHAPES:
        p = record(out, width, bits, group, symmetric)
        want = p.dense(torch.float64)
        for m in (1, 3, 20, FEW_NIBBLES + 1):
            x = rows(m, width)
            target = F.linear(x.double(), want)
            exact = PackedLinear(p, fast=False)(x)
            assert torch.allclose(exact.double(), target, rtol=1e-5, atol=1e-4 * float(target.abs().max()))
            fast = PackedLinear(p)(x)
            error = float((fast.double() - target).norm() / target.norm())
            assert error < 1.2e-2, (out, width, group, m, error)  # bf16: inputs, scales and sums of 2^-9 each


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_bytes_held_are_those_foretold(bits, symmetric):
    for out, width, group in SHAPES:
        for fast in (True, False):
            layer = PackedLinear(record(out, width, bits, group, symmetric), fast=fast)
            got = sum(p.numel() * p.element_size() for p in layer.parameters())
            assert got == held_bytes(out, width, bits, group, symmetric, "cpu", fast)


def test_nibbles_come_apart_as_they_went_in():
    for out in (16, 64, 80, 128, 208):
        codes = torch.randint(16, (out, 64), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        assert torch.equal(packed_linear.unpack_nibbles(packed, 0, out), codes.to(torch.uint8))
        if out > 64:
            assert torch.equal(packed_linear.unpack_nibbles(packed, 64, out), codes[64:].to(torch.uint8))


def test_a_layout_that_is_not_known_is_not_read(monkeypatch):
    monkeypatch.setattr(packed_linear, "nibble_layout", lambda: None)
    p = record(64, 64, 4, 64, True)
    layer = PackedLinear(p)
    assert isinstance(layer.codes, packed_linear.Words)
    x = rows(2, 64)
    assert torch.allclose(layer(x), F.linear(x, p.dense()), atol=1e-4)


@pytest.mark.parametrize(("bits", "group"), [(8, 64), (4, 32)])
@pytest.mark.parametrize("scale", [None, 0.03])
def test_integer_inputs_are_the_same_in_both_ways(bits, group, scale):
    p = record(64, 64, bits, group, bits == 8, outliers=9)
    code = InputCode(scale=scale)
    for m in (1, 5, 70):
        x = rows(m, 64)
        q, s, _ = code_input(x, code)
        target = F.linear((q * s).double(), Packed.dense(p, torch.float64)) - F.linear(
            (q * s - x).double(), p.dense(torch.float64) - record(64, 64, bits, group, bits == 8).dense(torch.float64)
        )  # entries kept aside see the input as it is
        exact, fast = PackedLinear(p, input=code, fast=False)(x), PackedLinear(p, input=code)(x)
        assert torch.allclose(exact.double(), target, atol=1e-4)
        close = 1e-4 if bits == 8 else 2e-2  # int8 by int8 is exact; nibbles are summed in bf16
        assert float((fast.double() - target).norm() / target.norm()) < close


def test_a_large_input_keeps_its_precision_and_spares_the_others():
    """LLM.int8: one channel sixty times the rest."""
    p = record(64, 128, 8, 128, True)
    x = rows(12, 128)
    x[:, 17] = 60.0 + x[:, 17]
    want = F.linear(x.double(), p.dense(torch.float64))

    def error(code, fast):
        return float((PackedLinear(p, input=code, fast=fast)(x).double() - want).norm() / want.norm())

    for fast in (True, False):
        plain, mixed = error(InputCode(), fast), error(InputCode(threshold=6.0), fast)
        assert mixed < 0.1 * plain, (plain, mixed)
    x[0, 3] = 6.0
    exact, fast = (PackedLinear(p, input=InputCode(threshold=6.0), fast=f)(x) for f in (False, True))
    assert torch.allclose(exact, fast, atol=1e-3)


def test_bias_and_shape_and_dtype():
    p, bias = record(64, 64, 4, 32, False, outliers=5), torch.randn(64)
    x = rows(6, 64).view(2, 3, 64).bfloat16()
    y = PackedLinear(p, bias)(x)
    assert y.shape == (2, 3, 64)
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), F.linear(x.float(), p.dense(), bias), rtol=3e-2, atol=3e-2)


def test_forms_are_chosen_by_what_kernels_take():
    assert held(64, 128, 4, 128) == ("nibbles", 1, 128)
    assert held(64, 128, 8, 32) == ("nibbles", 2, 32)  # more bits than a nibble, and a scale that is not the row's
    assert held(64, 128, 8, 0).form == "bytes"
    assert held(60, 128, 4, 128).form == "words"  # rows that are no multiple of 16
    assert held(64, 96, 4, 96).group == 32  # a whole row's scale, repeated
    assert held(64, 128, 4, 128, "cuda").form == "words"


# ---- parts, for several ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("out", "width", "group"), [(96, 128, 32), (112, 256, 256), (64, 64, 64), (24, 96, 32)])
def test_parts_hold_the_very_weight(bits, symmetric, out, width, group):
    layer = PackedLinear(record(out, width, bits, group, symmetric, outliers=9), rows(1, out)[0])
    whole = layer.dense()
    for dim in (0, 1):
        for of in (2, 4):
            size = (out, width)[dim] // of
            if isinstance(layer.codes, packed_linear.Nibbles) and size % (16, 32)[dim]:
                with pytest.raises(Incompatible, match=f"{size} of {(out, width)[dim]} {('outputs', 'inputs')[dim]}"):
                    layer.part(dim, 0, of)
                continue
            parts = [layer.part(dim, i, of) for i in range(of)]
            assert torch.equal(torch.cat([p.dense() for p in parts], dim), whole)
            bytes_of = [sum(p.nbytes for p in m.parameters()) for m in (layer, *parts)]
            # Whole rows' scales belong to every part of the inputs; a group's to the parts that it falls into.
            assert sum(bytes_of[1:]) <= bytes_of[0] + (of * (8 * out + 4 * out * width // 32) if dim else 0)
            for m in (1, 3, FEW_NIBBLES + 1):
                x = rows(m, width)
                if dim == 0:
                    y = torch.cat([p(x) for p in parts], 1)
                else:
                    assert all(p.bias is None for p in parts)
                    y = sum(p(part) for p, part in zip(parts, x.chunk(of, 1), strict=True)) + layer.bias
                want = layer(x)
                assert float((y - want).norm() / want.norm()) < 1.2e-2
