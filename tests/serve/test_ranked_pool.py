"""The pool of a divided model has as many blocks as the rank with the least room."""

import pytest
import torch
import torch.distributed as dist
from tests.serve.test_divided import PP, SERVED, TP, experiment, serve
from tests.world import world

from ridgeline.experiments import make
from ridgeline.predict.serving.arrivals import requests
from ridgeline.predict.serving.simulate import setup_of, surface_of
from ridgeline.serve import build_engine
from ridgeline.serve.build_engine import make_engine, make_follower
from ridgeline.spec.errors import UserError
from ridgeline.techniques.registry import resolve

BLOCK = 2048
"""Bytes of a block on a rank: of one of two heads, or of one of two layers."""
ROOMY = 1e9


def built(rank, e, free):
    """What a rank's engine has with ``free`` bytes of memory: blocks and longest request of rank 0, slots of a layer,
    layers, and tokens; or what it says."""
    plain, build_engine._free = build_engine._free, lambda _: free[rank]
    try:
        runner = None
        if rank:
            runner = make_follower(e, torch.device("cpu"))
            runner.follow()
            return runner.pool()[0][0].shape[2], len(runner.cache)
        eng = make_engine(e, torch.device("cpu"))
        slots, layers = eng.runner.pool()[0][0].shape[2], len(eng.runner.cache)
        tokens = serve(eng)[0]
        eng.close()
        return slots, layers, eng.blocks.count, eng.max_model_len, tokens
    except UserError as refusal:
        return refusal.what
    finally:
        build_engine._free = plain


def met(rank, e):
    """How many ranks the groups have that have met when a rank looks for free memory: they take some of it."""
    groups, found = [], []
    with pytest.MonkeyPatch.context() as patch:
        plain = dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda t, group=None: groups.append(group) or plain(t, group=group))
        patch.setattr(build_engine, "_free", lambda _: found.append(list(groups)) or ROOMY)
        made = make_follower(e, torch.device("cpu")) if rank else make_engine(e, torch.device("cpu"))
        made.follow() if rank else made.close()
    return [(dist.group.WORLD in groups, {dist.get_world_size(g) for g in groups}) for groups in found]


def plans(*plan, model=None, **workload):
    return experiment(*SERVED, *plan, model=model or {},
                      **{"kv_cache_bytes": None, "kv_cache_share": 0.5, "max_num_seqs": 4, **workload})  # fmt: skip


@pytest.mark.parametrize("plan", [TP, PP])
@pytest.mark.parametrize("poor", [0, 1])
def test_all_ranks_have_the_blocks_of_the_one_with_least_memory(plan, poor):
    free = [ROOMY, ROOMY]
    roomy = world(2).run(built, plans(plan), free)
    free[poor] = 6 * BLOCK / 0.5
    (slots, layers, blocks, longest, tokens), (others, rest) = world(2).run(built, plans(plan), free)
    assert (blocks, longest) == (6, 64)
    assert slots == others == 6 * 16 < roomy[0][0] == roomy[1][0] == 4 * 64
    assert layers == rest == (2 if plan == TP else 1)
    assert tokens == roomy[0][4]


@pytest.mark.parametrize("poor", [0, 1])
def test_the_longest_request_is_what_all_ranks_have_room_for(poor):
    free = [ROOMY, ROOMY]
    free[poor] = 3 * BLOCK / 0.5
    assert world(2).run(built, plans(TP), free)[0][2:4] == (3, 3 * 16)


def test_a_stage_with_more_layers_decides():
    """Rank 0, which has one of three layers, would have twice as many blocks."""
    e = plans(PP, model={"num_layers": 3}, kv_cache_bytes=16 * BLOCK)
    first, second = world(2).run(built, e, [ROOMY, ROOMY])
    assert (first[1], second[1]) == (1, 2)
    assert first[0] == second[0] == 8 * 16
    assert first[2] == 8


@pytest.mark.parametrize("plan", [TP, PP])
def test_ranks_have_met_before_they_look_for_memory(plan):
    assert world(2).run(met, plans(plan)) == [[(True, {2} if plan == TP else {1, 2})]] * 2


@pytest.mark.parametrize("poor", [0, 1])
def test_a_rank_without_room_is_told_of_by_all(poor):
    free = [ROOMY, ROOMY]
    free[poor] = 1.0
    said = world(2).run(built, plans(TP), free)
    assert said[0] == said[1] == f"rank {poor}: the key/value pool has room for 0 blocks of {BLOCK} bytes"


def predicted(e):
    """Blocks of the predicted pool."""
    e, techniques = resolve(e)
    arrivals = requests(e.workload)
    return setup_of(surface_of(e, techniques, arrivals), techniques, e.workload, arrivals)[0].blocks


def test_the_predicted_pool_of_uneven_stages_is_theirs():
    e = plans(PP, model={"num_layers": 3}, kv_cache_bytes=16 * BLOCK, engine="ridgeline", concurrency=1, requests=1)
    assert predicted(e) == 8


@pytest.mark.parametrize("layers", [(16, 16), (18, 14), (10, 22)])
def test_the_stage_with_least_memory_decides_in_predictions(layers):
    """The first one has the embedding and the head, too."""
    work = {"kind": "serve", "engine": "ridgeline", "max_num_seqs": 4096, "concurrency": 1, "requests": 1}
    e = make("llama3.1-8b", "2xa100-40g", work, [*SERVED, f"pipeline:degree=2,layers={layers[0]}+{layers[1]}"])
    m, device = e.model, e.cluster.device
    h, f, kv = m.hidden_size, m.intermediate_size, m.num_kv_heads * m.head_dim
    layer, outside = 2 * (2 * h * h + 2 * h * kv + 3 * h * f + 2 * h), 2 * (2 * m.vocab_size * h + h)
    room = [device.memory_bytes - device.reserved_bytes - layer * n for n in layers]
    room[0] -= outside
    blocks = [0.9 * r / (16 * n * 2 * kv * 2) for r, n in zip(room, layers, strict=True)]
    assert predicted(e) == int(min(blocks))
