import itertools

import pytest
import torch
from tests.compressing import LLAMA, MIXTRAL
from torch.func import functional_call

from ridgeline.nn.model.init import build
from ridgeline.runtime.structure import cut, groups, scale
from ridgeline.spec.model import ModelSpec

OPT = {**LLAMA, "family": "opt", "num_kv_heads": 4, "norm": "layernorm", "activation": "relu", "gated": False,
       "position": "learned", "position_offset": 2, "qkv_bias": True, "out_bias": True, "mlp_bias": True}  # fmt: skip
SPECS = {
    "llama": LLAMA, "mixtral": MIXTRAL, "tied": {**LLAMA, "tie_embeddings": True}, "opt": OPT,
    "biased": {**LLAMA, "qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "qwen3": {**LLAMA, "family": "qwen3", "qk_norm": True},
}  # fmt: skip


def random_model(fields):
    """fp64; norms and biases too are random."""
    model = build(ModelSpec(**fields), dtype=torch.float64)
    generator = torch.Generator().manual_seed(7)
    for p in model.parameters():
        p.data += 0.2 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model.requires_grad_(False)


def masked(model, keep, ids):
    """Logits of the whole model with everything that is not kept set to zero where it contributes."""
    parameters = dict(model.named_parameters())
    for place, units in keep.items():
        group = groups(model.spec)[place]
        factor = torch.zeros(group.size, dtype=torch.float64)
        factor[units] = 1
        scale(group, factor, parameters)
    return functional_call(model, parameters, (ids,))


@pytest.mark.parametrize("name", SPECS)
def test_every_dimension_is_in_one_group(name):
    """All but vocabulary, positions, experts and head dimension."""
    spec = ModelSpec(**SPECS[name])
    found = groups(spec)
    seen = [(p.parameter, p.dim) for g in found.values() for p in g.parts]
    assert len(seen) == len(set(seen))
    sizes = {p.name: p.shape for p in spec.parameters()}
    for group in found.values():
        for part in group.parts:
            assert sizes[part.parameter][part.dim] == group.size * part.width
    left = {(n, d) for n, shape in sizes.items() for d in range(len(shape))} - set(seen)
    kinds = ("embed.tokens", "embed.positions", "head.out", "router", "experts", "q_norm", "k_norm")
    assert all(any(kind in n for kind in kinds) and (d == 0) for n, d in left)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kinds", [("heads",), ("inner",), ("heads", "inner"), ("hidden",), ("hidden", "inner")])
def test_cut_model_computes_what_the_masked_one_does(name, kinds):
    spec = ModelSpec(**SPECS[name])
    if "hidden" in kinds and (spec.norm == "layernorm" or spec.qk_norm):
        pytest.skip("another function by construction")
    model = random_model(SPECS[name])
    generator = torch.Generator().manual_seed(3)
    keep = {}
    for place, group in groups(spec).items():
        if place[0] in kinds:
            keep[place] = torch.randperm(group.size, generator=generator)[: group.size * 3 // 4].sort().values
    made = cut(model, keep)
    ids = torch.randint(0, 258, (2, 12), generator=generator)
    torch.testing.assert_close(made(ids), masked(model, keep, ids), rtol=1e-9, atol=1e-9)
    assert {n: tuple(p.shape) for n, p in made.named_parameters()} == {p.name: p.shape for p in made.spec.parameters()}
    assert made.spec.num_parameters < spec.num_parameters
    assert all(a.data_ptr() != b.data_ptr() for a, b in itertools.product(made.parameters(), model.parameters()))


def test_layers_go():
    model = random_model({**LLAMA, "num_layers": 4})
    made = cut(model, {}, [0, 3])
    ids = torch.arange(10)[None]
    del model.layers["1"], model.layers["2"]
    torch.testing.assert_close(made(ids), model(ids))
    assert made.spec.num_layers == 2


def test_layers_must_keep_alike():
    model = random_model(LLAMA)
    with pytest.raises(ValueError, match=r"\[8, 48\] units of kind inner"):
        cut(model, {("inner", 0): torch.arange(8)})
