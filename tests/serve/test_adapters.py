"""Many tasks over one base: each request gets the tokens of a model with its adapter alone."""

import pytest
import torch
from tests.serving import ask, engine, greedy, model, run

from ridgeline.nn.peft import save_lora, save_own, state_of
from ridgeline.serve.request import Invalid
from ridgeline.spec.errors import UserError
from ridgeline.spec.plan import Call
from ridgeline.techniques.registry import make
from ridgeline.train.adapters import attach, load_adapter

KINDS = {
    "lora": {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"]},
    "dora": {"rank": 2, "targets": ["q_proj", "up_proj"], "dora": True},
    "bitfit": {},
    "bottleneck_adapter": {"size": 4},
    "diff_pruning": {"density": 0.05},
    "mask_tuning": {},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One trained-looking adapter of each kind, saved as training saves them."""
    made = model()
    out = {}
    for i, (name, options) in enumerate(KINDS.items()):
        kind = "lora" if name == "dora" else name
        technique = make(Call(name=kind, options=options))
        generator = torch.Generator().manual_seed(i)
        state = {}
        for at, layer in list(made.named_modules()):
            everywhere = kind not in ("lora", "bottleneck_adapter")
            if not at.endswith("_proj") or not (everywhere or at.rpartition(".")[2] in technique.targets):
                continue
            adapter = technique.around(layer)
            for leaf, t in adapter.state().items():
                spread = torch.randn(t.shape, generator=generator, dtype=t.dtype)
                state[f"{at}.{leaf}"] = t.detach() + spread * (0.5 if leaf != "adapter_scores" else 0.02)
        folder = tmp_path_factory.mktemp(name)
        plain = technique.model_dump(mode="json")
        if kind == "lora":
            save_lora(folder, made.spec, plain, state_of(state, (*technique.leaves, "lora_m")), "")
        else:
            save_own(folder, made.spec, kind, plain, technique.compact(state), "")
        out[name] = folder
    return out


def alone(name, folder, prompt, new):
    made = model()
    attach(made, load_adapter(folder, made.spec))
    return greedy(made, prompt, new)


@pytest.mark.parametrize(
    "plan", [("multi_adapter",), ("multi_adapter", "-padding_free"), ("multi_adapter:two_stage=true", "-padding_free")]
)
def test_every_kind_in_one_batch(folders, plan):
    made = model()
    before = {n: t.clone() for n, t in made.state_dict().items()}
    eng = engine(made, *plan, max_num_batched_tokens=24)
    for name, folder in folders.items():
        eng.load_adapter(name, folder)
        eng.check()
    prompts = {(name, i): [(5 * j + i) % 300 for j in range(4 + 9 * i)] for name in ["", *folders] for i in range(2)}
    from dataclasses import replace

    requests = [replace(ask(f"{n}/{i}", p, 6), adapter=n) for (n, i), p in prompts.items()]
    got, _ = run(eng, *requests)
    seen = set()
    for (name, i), prompt in prompts.items():
        expected = alone(name, folders[name], prompt, 6) if name else greedy(model(), prompt, 6)
        assert got[f"{name}/{i}", 0] == expected, name
        seen.add(tuple(expected))
    assert len(seen) > len(folders), "the adapters hardly matter"
    for name in folders:
        eng.unload_adapter(name)
    assert eng.blocks.borrowed == 0
    got, _ = run(eng, ask("r", [1, 2, 3]))
    assert got["r", 0] == greedy(model(), [1, 2, 3], 8)
    eng.adapters.tasks.activate(None)
    assert all(torch.equal(t, before[n]) for n, t in made.state_dict().items())


def test_a_name_loaded_again_shares_nothing_of_the_old(folders):
    from dataclasses import replace

    eng = engine(model(), "multi_adapter", "paged_kv:block_size=4")
    prompt = list(range(30))
    answers = []
    for kind in ("lora", "bitfit"):
        eng.load_adapter("same", folders[kind])
        for again in range(2):
            got, events = run(eng, replace(ask(f"{kind}{again}", prompt), adapter="same"))
            assert events[-1].cached_tokens == (28 if again else 0)
        answers.append(got[f"{kind}1", 0])
        eng.unload_adapter("same")
    assert answers == [alone(k, folders[k], prompt, 8) for k in ("lora", "bitfit")]
    _, events = run(eng, ask("base", prompt))
    assert events[-1].cached_tokens == 0


def test_memory_comes_out_of_the_pool(folders):
    eng = engine(model(), "multi_adapter", kv_cache_bytes=10 << 13)
    free = eng.blocks.free
    eng.load_adapter("a", folders["lora"])
    assert 0 < free - eng.blocks.free == eng.blocks.borrowed
    with pytest.raises(Invalid, match="can be spared"):
        eng.load_adapter("b", folders["mask_tuning"])
    assert "b" not in eng.adapters


def test_the_longest_request_fits_beside_any_adapters(folders):
    eng = engine(model(), "multi_adapter", "paged_kv:block_size=4", kv_cache_bytes=33 * 2048)
    with pytest.raises(Invalid, match="1 can be spared beside a request of 128 tokens"):
        eng.load_adapter("a", folders["lora"])
    eng = engine(model(), "multi_adapter", "paged_kv:block_size=4", kv_cache_bytes=40 * 2048)
    eng.load_adapter("a", folders["lora"])
    got, _ = run(eng, ask("longest", [1, 2, 3], 125, ignore_eos=True))
    assert len(got["longest", 0]) == 125


def test_refusals(folders, tmp_path):
    from dataclasses import replace

    eng = engine(model(), "multi_adapter")
    with pytest.raises(Invalid, match="no adapter 'x'"):
        eng.add(replace(ask("r", [1]), adapter="x"))
    with pytest.raises(UserError):
        eng.load_adapter("x", tmp_path)
    eng.load_adapter("x", folders["lora"])
    with pytest.raises(Invalid, match="taken"):
        eng.load_adapter("x", folders["lora"])
    eng.add(replace(ask("r", [1]), adapter="x"))
    with pytest.raises(Invalid, match="1 requests are using"):
        eng.unload_adapter("x")
    run(eng)
    eng.unload_adapter("x")
    with pytest.raises(Invalid, match="not loaded"):
        eng.unload_adapter("x")
    with pytest.raises(Invalid, match="switch on multi_adapter"):
        engine(model()).load_adapter("x", folders["lora"])
