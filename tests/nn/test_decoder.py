"""All layers in one kernel, against the same model operator by operator."""

from array import array

import pytest
import torch
from tests.nn.conftest import CONFIGS

from ridgeline.nn.kernels import native
from ridgeline.nn.memory.cpu_paged_attention import cpu_paged_attention
from ridgeline.nn.memory.decoder import Decoder, Pool, find_decoder
from ridgeline.nn.memory.kv_pool import BatchLayout, PagedCache, Piece, PlainStore, Singles
from ridgeline.nn.model.attention import alibi_slopes, naive_attention
from ridgeline.nn.model.generate import decode, make_cache, prefill
from ridgeline.nn.model.init import build
from ridgeline.nn.model.mask import Mask, ScoreChanges
from ridgeline.nn.quant.packed import Packed
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.nn.quant.packed_model import PackedExperts
from ridgeline.nn.quant.quantized_kv import KINDS
from ridgeline.spec.model import ModelSpec

pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no C++ compiler")

BEFORE, BATCH = 9, 3
OTHERS = {"bert", "gpt_oss", "llama4_text", "t5"}
"""Families with layers that the kernel does not compute."""


def made(name, dtype=torch.float32, **changed):
    spec = ModelSpec.from_config(CONFIGS[name], name=name).model_copy(update=changed)
    model = build(spec, torch.device("cpu"), dtype, seed=3).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():  # norms and biases that do something
        if p.dim() == 1:
            p.add_(0.2 * torch.randn(p.shape, generator=generator).to(dtype))
    return model


def both(model):
    """Logits after one more token, by the model and by the kernel, and how far their caches are apart."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.spec.vocab_size, (BATCH, BEFORE + 1), generator=generator)
    caches = [make_cache(model, BATCH, BEFORE + 2) for _ in range(2)]
    with torch.inference_mode():
        for cache in caches:
            prefill(model, ids[:, :-1], cache)
        want = decode(model, ids[:, -1], caches[0])
        x = model.embed(ids[:, -1:], None, None, BEFORE)[:, 0]
        rope = None if model.rotary is None else model.rotary.tables(None, 0, BEFORE + 1, x.device, x.dtype)
        held = list(caches[1].values())
        at = Singles(torch.arange(BATCH), torch.zeros(BATCH, 1, dtype=torch.int32),
                     torch.full((BATCH,), BEFORE + 1, dtype=torch.int32), BEFORE + 2)  # fmt: skip
        decoder, places = Decoder(model), torch.full((BATCH,), BEFORE)
        y = decoder(x, rope, places, Pool.contiguous(held), at, places)
        if model.norm is not None:
            y = decoder.norm(y)
        got = model.head(y)
    apart = max(
        float((getattr(a, at)[:, :, : BEFORE + 1] - getattr(b, at)[:, :, : BEFORE + 1]).abs().max())
        for a, b in zip(caches[0].values(), held, strict=True) for at in ("keys", "values")
    )  # fmt: skip
    return got, want, apart


@pytest.mark.parametrize("name", [n for n in CONFIGS if CONFIGS[n].get("model_type") not in OTHERS])
def test_every_family_is_computed_or_left_alone(name):
    model = made(name)
    if find_decoder(model) is None:
        pytest.skip("its layers are computed one operator after the other")
    got, want, apart = both(model)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert apart < 1e-5


def test_the_common_families_are_computed():
    for name in ("llama", "llama3", "mistral", "qwen2", "qwen3", "gpt2", "opt", "granite", "phi3", "mixtral",
                 "qwen3_moe"):  # fmt: skip
        assert find_decoder(made(name)) is not None, name


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("gated", [True, False])
def test_activations(activation, gated):
    got, want, _ = both(made("llama", activation=activation, gated=gated))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_in_codes(bits, symmetric):
    model = made("llama_mha_bias_tied")
    generator = torch.Generator().manual_seed(2)
    for parent in [m for block in model.layers.values() for m in (block.attention, block.mlp)]:
        for name, layer in list(parent.named_children()):
            if isinstance(layer, torch.nn.Linear):
                out, width = layer.weight.shape
                codes = torch.randint(1 << bits, (out, width), generator=generator, dtype=torch.int32).to(torch.uint8)
                zero = None if symmetric else torch.full((out, 1), 1 << (bits - 1), dtype=torch.uint8)
                packed = Packed(codes, torch.full((out, 1), 2.0**-bits).half(), zero, bits, width)
                setattr(parent, name, PackedLinear(packed, layer.bias))
    got, want, _ = both(model)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_in_codes(bits):
    model = made("mixtral", hidden_size=64, intermediate_size=96)
    generator = torch.Generator().manual_seed(2)

    def packed(out, width):
        codes = torch.randint(1 << bits, (out, width), generator=generator, dtype=torch.int32).to(torch.uint8)
        return PackedLinear(Packed(codes, torch.full((out, width // 32), 2.0**-bits).half(), None, bits, 32))

    for block in model.layers.values():
        count, h, f = model.spec.num_experts, 64, 96
        lists = [[packed(*shape) for _ in range(count)] for shape in ((f, h), (f, h), (h, f))]
        block.mlp.experts = PackedExperts("silu", *lists)
    got, want, _ = both(model)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
    block.mlp.run = lambda experts, rows, counts: experts(rows, counts)
    assert find_decoder(model) is None


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_16_bit_weights(name):
    got, want, _ = both(made(name, torch.bfloat16))
    assert float((got - want).float().norm() / want.float().norm()) < 2e-2  # bf16 rounds after every operator


def test_what_is_changed_is_not_computed():
    assert find_decoder(made("llama", torch.float64)) is None
    model = made("llama")
    model.layers["0"].register_forward_hook(lambda *_: None)
    assert find_decoder(model) is None
    model = made("llama")
    model.layers["1"].mlp.down_proj = torch.nn.Sequential(model.layers["1"].mlp.down_proj)
    with pytest.raises(ValueError, match="Sequential"):
        Decoder(model)


CHANGES = {
    "none": None,
    "soft cap": ScoreChanges(1.5, None, None),
    "alibi": ScoreChanges(None, alibi_slopes(6), None),
    "sinks": ScoreChanges(None, None, torch.tensor([0.5, -1.0, 3.0, 0.0, 1.0, -9.0])),
}


@pytest.mark.parametrize(("kind", "changed"), [*((k, "none") for k in ("", *KINDS)), *(("", c) for c in CHANGES)])
@pytest.mark.parametrize("window", [0, 11, -11])
@pytest.mark.parametrize("block", [1, 16])
def test_attention_over_pages(kind, changed, window, block):
    heads, groups, width, lengths = 6, 2, 24, [1, 40, 130]
    generator = torch.Generator().manual_seed(4)
    blocks = -(-max(lengths) // block)
    table = torch.randperm(3 * blocks, generator=generator).view(3, blocks).int()
    shape = (1, groups, 3 * blocks * block, width)
    stores = [KINDS[kind](shape, torch.device("cpu")) if kind else PlainStore(shape, torch.float32, torch.device("cpu"))
              for _ in range(2)]  # fmt: skip
    for store in stores:
        store.write(torch.arange(shape[2]), torch.randn(shape, generator=generator))
    q = torch.randn(3, heads, width, generator=generator)
    singles = Singles(torch.arange(3), table, torch.tensor(lengths, dtype=torch.int32), block)
    got = cpu_paged_attention(q, *stores, singles, window, CHANGES[changed])
    for b, n in enumerate(lengths):
        at = torch.arange(max(0, n - window) if window > 0 else 0, n)
        at = at[at // 11 == (n - 1) // 11] if window < 0 else at
        slots = table[b].long()[at // block] * block + at % block
        k, v = (s.read(slots, torch.float32).repeat_interleave(heads // groups, 1).double() for s in stores)
        mask = Mask(None, False, changes=CHANGES[changed])
        want = naive_attention(q[b][None, :, None].double(), k, v, mask)[0, :, 0]
        torch.testing.assert_close(got[b].double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["", *KINDS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_writes_the_codes_that_operators_write(kind, dtype):
    """The engine's cache after a step by the kernel, and after one operator by operator."""
    model, layout, block, blocks = made("qwen3", dtype), BatchLayout(), 4, 12
    spec, pools = model.spec, []
    generator = torch.Generator().manual_seed(5)
    past = torch.randn(2, spec.num_kv_heads, 40, spec.head_dim, generator=generator)
    table = torch.randperm(blocks, generator=generator)[: 2 * 5].view(2, 5).int()
    at = Singles(torch.arange(2), table, torch.tensor([18, 7], dtype=torch.int32), block)
    new = torch.tensor(
        [int(row[(n - 1) // block]) * block + (n - 1) % block for row, n in zip(table, (18, 7), strict=True)]
    )
    x = torch.randn(2, spec.hidden_size, generator=generator).to(dtype)
    assert model.rotary is not None
    places = torch.tensor([17, 6])
    tables = model.rotary.tables(None, 0, 40, x.device, dtype)
    rope = (tables[0][places], tables[1][places])
    layout.slots, layout.singles, layout.kernel = new, at, cpu_paged_attention
    layout.pieces = [Piece(i, i + 1, [], False, n, array("i", row.tolist())) for i, (row, n) in
                     enumerate(zip(table, (18, 7), strict=True))]  # fmt: skip
    for _ in range(2):
        shape = (1, spec.num_kv_heads, blocks * block, spec.head_dim)
        layers = [PagedCache(layout, shape, dtype, x.device, kind) for _ in model.layers]
        for layer in layers:
            for store, rows in zip(layer.stores, past, strict=True):
                store.write(torch.arange(40), rows[None].to(dtype))
        pools.append(layers)
    with torch.inference_mode():
        got = Decoder(model)(x, tables, places, Pool.paged(pools[0]), at, new)
        want = x[None]
        for block_, cache in zip(model.layers.values(), pools[1], strict=True):
            want = block_(want, Mask(None, False), rope, cache)
    close = 1e-4 if dtype == torch.float32 else 3e-2
    assert float((got - want[0]).float().norm() / want.float().norm()) < (close if not kind else max(close, 5e-3))
    first = [layers[0].stores for layers in pools]  # what later layers store follows inputs that differ by rounding
    for one, other in zip(*first, strict=True):
        a, b = (store.read(new, torch.float32) for store in (one, other))
        far = (a - b).abs() > (1e-5 if dtype == torch.float32 else 3e-2) * (1 + b.abs())
        assert far.float().mean() <= 0.05, (a, b)  # a value at the edge of two codes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out", "width"), [(37, 96), (8, 32), (5, 333), (66, 1000)])
def test_dense_products_of_few_rows(dtype, out, width):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, width, generator=generator).to(dtype)
    bias, x = torch.randn(out, generator=generator), torch.randn(13, width, generator=generator).to(dtype).float()
    for m in (1, 2, 3, 5, 6, 7, 13):
        y = torch.empty(m, out)
        given = native.Linear(0, weight.data_ptr(), None, None, bias.data_ptr(), native.TYPES[dtype], out, width, width)
        native.dense_linear(given, x[:m], y)
        want = torch.nn.functional.linear(x[:m].double(), weight.double(), bias.double())
        assert torch.allclose(y.double(), want, rtol=1e-4, atol=1e-4 * width**0.5)


@pytest.mark.parametrize("kind", ["finite", "nan", "inf", "-inf", "some -inf", "last nan"])
@pytest.mark.parametrize("width", [5, 37, 4096])
def test_rows_without_a_finite_logit(kind, width):
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    x[1] = {"finite": x[1], "nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}.get(kind, x[1])
    if kind == "some -inf":
        x[1, ::2] = -torch.inf
    if kind == "last nan":
        x[1, -1] = torch.nan
    assert native.finite(x) == torch.isfinite(x.amax(1)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", [{}, {"logits_scaling": 2.0, "logits_soft_cap": 5.0}])
def test_the_head_of_few_rows(dtype, changed):
    model = made("llama", dtype, **changed)
    x = torch.randn(40, model.spec.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    decoder = Decoder(model)
    with torch.inference_mode():
        assert decoder.logits(x) is None  # more rows than pay
        close = 1e-2 if dtype == torch.bfloat16 else 1e-4
        assert torch.allclose(decoder.logits(x[:7]), model.head(x[:7]), rtol=close, atol=close)
