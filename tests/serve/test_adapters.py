"""Many tasks over one base: each request gets the tokens of a model with its adapter alone."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from tests.nn.conftest import CONFIGS
from tests.serving import LORAS, adapted, adapters_in, ask, engine, greedy, in_slots, model, run

from ridgeline.nn.model import fused
from ridgeline.nn.model.served import join_served
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.serve.request import EngineRequest, Invalid
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.precision.fp8_linear_torch import StoredFp8Linear
from ridgeline.train.adapter_folder import attach, load_adapter


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return adapters_in(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    return adapters_in(tmp_path_factory.mktemp("loras"), kinds=LORAS)


def alone(folder, prompt, new):
    return greedy(adapted(folder), prompt, new)


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
        expected = alone(folders[name], prompt, 6) if name else greedy(model(), prompt, 6)
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


@pytest.mark.parametrize("plan", ["fp8", "rtn:bits=8,group_size=16"])
def test_over_weights_in_codes(folders, plan):
    """As over a model with the numbers that the codes stand for; what changes the weights themselves is refused."""
    from dataclasses import replace

    eng, plain = engine(model(dtype=torch.float32), plan, "multi_adapter"), model(dtype=torch.float32)
    with torch.no_grad():
        for name, layer in eng.model.named_modules():
            if isinstance(layer, StoredFp8Linear):
                plain.get_submodule(name).weight.copy_(layer.codes.view(torch.float8_e4m3fn).float() * layer.inverse)
            elif isinstance(layer, PackedLinear):
                plain.get_submodule(name).weight.copy_(layer.dense())
    prompt = [(5 * j) % 300 for j in range(21)]
    for name, folder in folders.items():
        if name in ("dora", "diff_pruning", "mask_tuning"):
            with pytest.raises(UserError, match="has codes"):
                eng.load_adapter(name, folder)
            continue
        eng.load_adapter(name, folder)
        made = deepcopy(plain)
        attach(made, load_adapter(folder, made.spec))
        got, _ = run(eng, replace(ask(name, prompt, 6), adapter=name))
        assert got[name, 0] == greedy(made, prompt, 6), name


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
    assert answers == [alone(folders[k], prompt, 8) for k in ("lora", "bitfit")]
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


@pytest.mark.parametrize("slots", [False, True])
def test_of_latent_attention_all_but_the_last_projection_of_keys(tmp_path, slots, monkeypatch):
    """That is multiplied into the queries of all requests at once."""
    from dataclasses import replace

    spec = ModelSpec.from_config({**CONFIGS["deepseek_v3"], "vocab_size": 300}, name="d")
    monkeypatch.setattr("tests.serving.model", partial(model, **spec.model_dump()))
    made = model(**spec.model_dump())
    kinds = {"all": {"rank": 4, "targets": ["q_b_proj", "kv_b_proj"]},
             "others": {"rank": 4, "targets": ["q_a_proj", "q_b_proj", "kv_a_proj", "o_proj"]}}  # fmt: skip
    folders = adapters_in(tmp_path, kinds=kinds)
    eng = engine(made, "multi_adapter")
    eng = in_slots(eng) if slots else eng
    with pytest.raises(UserError, match="kv_b_proj, which latent attention"):
        eng.load_adapter("all", folders["all"])
    eng.load_adapter("others", folders["others"])
    got, _ = run(eng, replace(ask("a", prompt_of(1), 6), adapter="others"), ask("b", prompt_of(2), 6))
    assert got["a", 0] == greedy(adapted(folders["others"]), prompt_of(1), 6)
    assert got["b", 0] == greedy(model(**spec.model_dump()), prompt_of(2), 6)


def test_an_encoder_reads_for_all_its_tasks_in_one_batch(tmp_path):
    """PetS' own setting: many tasks over one BERT, which has no cache whose pool they could share."""
    kinds = adapters_in(tmp_path, "bert-tiny")
    eng = engine(model("bert-tiny"), "multi_adapter", max_num_batched_tokens=128)
    for name, folder in kinds.items():
        eng.load_adapter(name, folder)
    prompts = {name: [(7 * j + i) % 300 for j in range(5 + 2 * i)] for i, name in enumerate(["", *kinds])}
    _, events = run(eng, *[EngineRequest(f"r{n}", p, adapter=n, embed=True) for n, p in prompts.items()])
    assert len(events) == len(prompts)
    found = {e.request[1:]: torch.tensor(e.embedding, dtype=torch.float64) for e in events}
    for name, prompt in prompts.items():
        alone = adapted(kinds[name], "bert-tiny") if name else model("bert-tiny")
        with torch.inference_mode():
            want = alone(torch.tensor([prompt]), return_hidden=True)[0].mean(0)
        torch.testing.assert_close(found[name], want, rtol=1e-6, atol=1e-6)
    for name in kinds:
        eng.unload_adapter(name)
    assert not eng.blocks.borrowed


def prompt_of(i):
    return [(5 * j + i) % 300 for j in range(4 + 5 * i)]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_lora_in_slots(loras, folders, joined, padded, monkeypatch):
    """As on a GPU: several in one batch, behind merged projections and others, and beside other kinds of adapters."""
    from dataclasses import replace

    made = model()
    if joined:
        join_served(made)
    merged = []
    plain = fused.Known.product
    monkeypatch.setattr(fused.Known, "product", lambda *a: merged.append(plain(*a)) or merged[-1])
    eng = in_slots(engine(made, "multi_adapter", *(["-padding_free"] if padded else []), max_num_batched_tokens=24))
    for name, folder in loras.items():
        eng.load_adapter(name, folder)
    want = {name: alone(folder, prompt_of(i), 6) for i, (name, folder) in enumerate(loras.items())}
    want[""] = greedy(model(), prompt_of(5), 6)

    def served(*names):
        asked = [replace(ask(n, prompt_of(list(loras).index(n) if n else 5), 6), adapter=n) for n in names]
        return {name: got for (name, _), got in run(eng, *asked)[0].items()}

    assert served("wide", "", "lora", "other") == want
    assert (sum(y is not None for y in merged) > 10) == joined
    one_by_one = []
    routed = eng.adapters.tasks.activate_rows
    eng.adapters.tasks.activate_rows = lambda tasks, dim: one_by_one.append(tasks) or routed(tasks, dim)
    assert served("lora", "") == {n: want[n] for n in ("lora", "")}
    assert not one_by_one
    eng.load_adapter("dora", folders["dora"])
    asked = [replace(ask(n, prompt_of(1), 6), adapter=n) for n in ("dora", "wide", "lora", "")]
    got, _ = run(eng, *asked)
    assert len(one_by_one) > 1
    assert got["dora", 0] == alone(folders["dora"], prompt_of(1), 6)
    assert got["wide", 0] == want["wide"]
    one_by_one.clear()
    assert served("other", "wide") == {n: want[n] for n in ("other", "wide")}
    assert not one_by_one
    eng.unload_adapter("wide")
    assert served("", "other") == {n: want[n] for n in ("", "other")}
    for name in ("dora", "lora", "other"):
        eng.unload_adapter(name)
    assert eng.blocks.borrowed == 0
    assert served("") == {"": want[""]}
    assert eng.model.layers["0"].attention.o_proj is made.layers["0"].attention.o_proj


@pytest.mark.parametrize("joined", [False, True])
def test_lora_in_slots_over_float8(loras, joined):
    from dataclasses import replace

    eng = engine(model(dtype=torch.float32), "fp8", "multi_adapter")
    plain = model(dtype=torch.float32)
    with torch.no_grad():
        for name, layer in eng.model.named_modules():
            if isinstance(layer, StoredFp8Linear):
                plain.get_submodule(name).weight.copy_(layer.codes.view(torch.float8_e4m3fn).float() * layer.inverse)
    if joined:
        join_served(eng.model)
    in_slots(eng)
    for name, folder in loras.items():
        eng.load_adapter(name, folder)
    got, _ = run(eng, *[replace(ask(n, prompt_of(3), 6), adapter=n) for n in loras])
    for name, folder in loras.items():
        made = deepcopy(plain)
        attach(made, load_adapter(folder, made.spec))
        assert got[name, 0] == greedy(made, prompt_of(3), 6), name


def test_slots_stay_where_they_are_until_they_are_too_few(loras):
    """Their memory comes out of the pool."""
    eng = in_slots(engine(model(), "multi_adapter"))
    slots = eng.runner.slots
    eng.load_adapter("a", loras["lora"])
    first, borrowed = slots.version, eng.blocks.borrowed
    assert borrowed == len(eng.adapters.shared) > 0
    for name in "bcd":
        eng.load_adapter(name, loras["lora"])
    assert (slots.version, eng.blocks.borrowed) == (first, borrowed)
    eng.unload_adapter("b")
    eng.load_adapter("a", loras["lora"], replace=True)
    eng.load_adapter("b", loras["lora"])
    assert slots.version == first
    eng.load_adapter("e", loras["lora"])
    assert slots.version == first + 1
    assert slots.count == 8
    assert eng.blocks.borrowed == 2 * borrowed
    eng.load_adapter("wide", loras["wide"])  # of a higher rank, around other layers
    assert slots.version == first + 2
    assert slots.capacity == 32
    from dataclasses import replace

    got, _ = run(eng, *[replace(ask(n, prompt_of(2), 6), adapter=n) for n in ("a", "e", "wide")])
    assert got["a", 0] == got["e", 0] == alone(loras["lora"], prompt_of(2), 6)
    assert got["wide", 0] == alone(loras["wide"], prompt_of(2), 6)
    for name in ("a", "b", "c", "d", "e", "wide"):
        eng.unload_adapter(name)
    assert eng.blocks.borrowed == slots.nbytes == 0


def test_a_slot_has_nothing_of_the_adapter_that_left_it(loras):
    """Whose other layers stay in use, by one that stays."""
    from dataclasses import replace

    eng = in_slots(engine(model(), "multi_adapter"))
    for name in ("stays", "leaves"):
        eng.load_adapter(name, loras["wide"])
    slot = eng.runner.slots.slot["leaves"]
    eng.unload_adapter("leaves")
    eng.load_adapter("comes", loras["lora"])
    assert eng.runner.slots.slot["comes"] == slot
    got, _ = run(eng, *[replace(ask(n, prompt_of(2), 6), adapter=n) for n in ("comes", "stays")])
    assert got["comes", 0] == alone(loras["lora"], prompt_of(2), 6)
    assert got["stays", 0] == alone(loras["wide"], prompt_of(2), 6)


def test_no_memory_for_slots(loras, monkeypatch):
    """What is loaded stays as it is."""
    from dataclasses import replace

    eng = in_slots(engine(model(), "multi_adapter"))
    eng.load_adapter("a", loras["lora"])

    def grown(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("ridgeline.nn.adapters.lora_slots.LoraSite.grown", grown)
    with pytest.raises(Invalid, match="no memory"):
        eng.load_adapter("a", loras["wide"], replace=True)
    got, _ = run(eng, replace(ask("r", prompt_of(2), 6), adapter="a"))
    assert got["r", 0] == alone(loras["lora"], prompt_of(2), 6)


def test_costs_of_a_task_in_slots(loras):
    """Every row has an adapter of zeros meanwhile."""
    eng = in_slots(engine(model(), "multi_adapter"))
    eng.load_adapter("lora", loras["lora"])
    with eng.adapters.probe():
        got, _ = run(eng, ask("r", prompt_of(2), 6), check=False)
        assert eng.runner.slots.rows.items is not None
    assert got["r", 0] == greedy(model(), prompt_of(2), 6)
    assert list(eng.runner.slots.slot) == ["lora"]
