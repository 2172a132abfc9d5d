"""The twin against its spec and against itself: names, masks, caches, precision, FLOPs, checkpointing, sharding."""

import copy

import pytest
import torch
from tests.nn.conftest import CONFIGS, DECODERS, randomize, spec_of
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.nn import (
    build,
    decode,
    init_weights,
    load_checkpoint,
    load_into,
    make_cache,
    materialize,
    prefill,
    save_checkpoint,
    token_loss,
)
from ridgeline.nn.model.generate import generate
from ridgeline.spec.errors import UserError


@pytest.mark.parametrize("name", list(CONFIGS))
def test_parameters_are_those_of_the_spec(name):
    model, spec = build(spec_of(name), device="meta"), spec_of(name)
    assert {(n, tuple(p.shape)) for n, p in model.named_parameters()} == {(p.name, p.shape) for p in spec.parameters()}
    assert sum(p.numel() for p in model.parameters()) == spec.num_parameters
    if spec.tie_embeddings:
        tied = build(spec)
        assert tied.head.out.weight is tied.embed.tokens.weight


def test_unknown_attention_names_the_known():
    with pytest.raises(UserError, match="flash"):
        build(spec_of("llama")).set_attention("flsh")


def test_weights_depend_on_seed_and_name_only():
    spec = spec_of("llama")
    model, torch_state = build(spec, seed=3), torch.random.get_rng_state()
    torch.manual_seed(123)
    again = build(spec, seed=3)
    for (n, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), n
    assert not torch.equal(model.embed.tokens.weight, build(spec, seed=4).embed.tokens.weight)
    stage = build(spec, device="meta")  # the last stage of a pipeline: no embedding, one layer
    stage.embed = None
    del stage.layers["0"]
    materialize(stage, "cpu", seed=3)
    for n, p in stage.named_parameters():
        assert torch.equal(p, model.get_parameter(n)), n
    assert torch.equal(build(spec, dtype=torch.bfloat16, seed=3).head.out.weight, model.head.out.weight.bfloat16())
    torch.random.set_rng_state(torch_state)


def test_initial_scale():
    model = build(spec_of("gpt2"))
    assert model.layers["0"].mlp.up_proj.weight.detach().std() == pytest.approx(0.02, rel=0.1)
    assert model.layers["0"].mlp.down_proj.weight.detach().std() == pytest.approx(0.02 / 2, rel=0.1)
    assert (model.layers["1"].attention_norm.weight == 1).all()
    assert (model.layers["1"].attention.q_proj.bias == 0).all()


def test_pipeline_pieces_equal_the_whole(ids):
    model = build(spec_of("llama"))
    randomize(model)
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    first.norm = first.head = last.embed = None
    del first.layers["1"], last.layers["0"]
    torch.testing.assert_close(last(first(ids)), model(ids))


@pytest.mark.parametrize("attention", ["naive", "flash"])
@pytest.mark.parametrize("name", DECODERS)
def test_cached_decoding_equals_no_cache(name, attention, ids):
    model = build(spec_of(name))
    randomize(model)
    model.set_attention(attention)
    tokens = ids[:, :5]
    with torch.no_grad():
        for _ in range(7):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    assert torch.equal(generate(model, ids[:, :5], 7), tokens)


@pytest.mark.parametrize("attention", ["naive", "flash"])
def test_prompt_in_pieces(attention, ids):
    model = build(spec_of("mistral"))
    randomize(model)
    model.set_attention(attention)
    with torch.no_grad():
        cache = make_cache(model, 2, 12)
        for part in ids[:, :10].split([4, 6], dim=1):
            last = prefill(model, part, cache)
        torch.testing.assert_close(last, model(ids[:, :10])[:, -1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(decode(model, ids[:, 10], cache), model(ids[:, :11])[:, -1], atol=1e-5, rtol=1e-5)


def test_capped_attention_in_blocks_is_that_of_all_at_once():
    model = build(spec_of("gemma2"), dtype=torch.float64)
    randomize(model)
    ids = torch.randint(96, (1, 300), generator=torch.Generator().manual_seed(3))
    found = []
    for attention in ("naive", "flash"):
        model.set_attention(attention)
        model.zero_grad()
        logits = model(ids)
        logits.logsumexp(-1).sum().backward()
        found.append((logits.detach(), model.layers["1"].attention.k_proj.weight.grad.clone()))
    torch.testing.assert_close(found[1], found[0])


def test_generate_stops_at_eos_and_samples_by_seed(ids):
    model = build(spec_of("llama"))
    randomize(model)
    greedy = generate(model, ids, 6)
    eos = int(greedy[0, 13])
    stopped = generate(model, ids[:1], 6, eos=eos)
    assert int(stopped[0, -1]) == eos
    assert stopped.shape[1] <= 14
    a, b = (generate(model, ids, 6, temperature=1.0, seed=s) for s in (1, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, generate(model, ids, 6, temperature=1.0, seed=2))


def test_generate_refuses(ids):
    with pytest.raises(UserError, match="encoder"):
        generate(build(spec_of("bert")), ids, 1)
    with pytest.raises(UserError, match="at most 52"):
        generate(build(spec_of("gpt2")), ids, 53)


@pytest.mark.parametrize("attention", ["naive", "flash"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_autocast_and_checkpointing(name, attention, ids):
    """bf16 autocast trains; recomputation under it gives the very same gradients; training after inference works."""
    model = build(spec_of(name))
    model.set_attention(attention)
    with torch.inference_mode():
        model(ids)
    gradients = []
    for recompute in (False, True):
        if recompute:
            for block in model.layers.values():
                block.forward = lambda *a, f=block.forward: checkpoint(f, *a, use_reentrant=False)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            total, count = token_loss(model(ids, return_hidden=True), model.head, ids)
        (total / count).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})
    assert total.dtype == torch.float32
    for n, g in gradients[0].items():
        assert g.dtype == torch.float32
        assert torch.equal(g, gradients[1][n]), n


@pytest.mark.parametrize("name", list(CONFIGS))
def test_bfloat16_is_near_float32(name, ids):
    model = build(spec_of(name), dtype=torch.float32)
    low = build(spec_of(name), dtype=torch.bfloat16)
    with torch.no_grad():
        want, got = model(ids), low(ids)
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).abs().max() < 0.05 * want.abs().max() + 0.02


@pytest.mark.parametrize("attention", ["naive", "flash"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_flops_on_the_meta_device(name, attention):
    """Forward and backward run without data, and matrix FLOPs come out as the spec's sizes say."""
    spec = spec_of(name)
    model = build(spec, device="meta")
    model.set_attention(attention)
    ids = torch.zeros(2, 12, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        total, _ = token_loss(model(ids, return_hidden=True), model.head, ids)
        forward = counter.get_total_flops()
        total.backward()
    weights = 0
    for p in model.spec.parameters():
        if len(p.shape) > 1 and not p.name.startswith("embed.") and not p.name.endswith("_bias"):
            share = spec.experts_per_token / spec.num_experts if ".experts." in p.name else 1
            weights += p.numel * share
    weights += spec.vocab_size * spec.hidden_size if spec.tie_embeddings else 0
    scores = (
        spec.num_layers
        * 2
        * 2
        * 2
        * 12
        * 12
        * (spec.q_size if attention == "flash" else (spec.q_size + spec.context_size) // 2)
    )
    assert forward == 2 * 24 * weights + scores
    assert counter.get_total_flops() > 2.9 * forward


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_double_precision_gradients(name, ids):
    """The whole model's gradient against central differences along a random direction."""
    model = build(spec_of(name), dtype=torch.float64)
    randomize(model)
    parameters = list(model.parameters())
    rng = torch.Generator().manual_seed(5)
    direction = [torch.randn(p.shape, generator=rng, dtype=torch.float64) for p in parameters]

    def loss():
        return token_loss(model(ids, return_hidden=True), model.head, ids)[0]

    loss().backward()
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, direction, strict=True))
    values = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d, alpha=step)
            values.append(loss())
    torch.testing.assert_close((values[0] - values[1]) / 2e-6, slope, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_fully_sharded_equals_plain(name, chunk, ids, tmp_path):
    """FSDP2 on one rank: meta build, shard, materialize, train; same loss and gradients as without."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain = build(spec_of(name), seed=7)
    total, _ = token_loss(plain(ids, return_hidden=True), plain.head, ids, chunk)
    total.backward()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = build(spec_of(name), device="meta")
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        if not model.spec.tie_embeddings:
            fully_shard(model.head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        materialize(model, "cpu", seed=7)
        sharded, _ = token_loss(model(ids, return_hidden=True), model.head, ids, chunk)
        sharded.backward()
        torch.testing.assert_close(sharded, total)
        for n, p in model.named_parameters():
            torch.testing.assert_close(p.grad.full_tensor(), plain.get_parameter(n).grad, msg=n)
        save_checkpoint(model, tmp_path / "saved")
        loaded = load_checkpoint(tmp_path / "saved")
        assert torch.equal(loaded.embed.tokens.weight, plain.embed.tokens.weight)
        for p in model.parameters():
            torch.nn.init.zeros_(p)
        load_into(model, tmp_path / "saved")
        for n, p in model.named_parameters():
            assert torch.equal(p.full_tensor(), plain.get_parameter(n)), n
    finally:
        dist.destroy_process_group()


def test_init_weights_in_place(ids):
    model = build(spec_of("llama"))
    before = model(ids)
    randomize(model)
    init_weights(model, 0)
    assert torch.equal(model(ids), before)
