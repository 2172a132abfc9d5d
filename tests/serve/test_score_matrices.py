"""A plan without flash_attention: the same tokens by a product, a softmax and a product, and no fused kernel."""

import pytest
import torch
from tests.serve.drafts import untrained
from tests.serve.test_engine import SERVED
from tests.serving import ask, engine, greedy, model, run
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline import catalog
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.memory.meter import Meter
from ridgeline.serve import runner
from ridgeline.serve.request import EngineRequest
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.scheduling import Limits, Scheduling
from ridgeline.spec.workload import Serve

PROMPTS = {f"r{i}": [(7 * i + 3 * j * j) % 300 for j in range(3 + 9 * i)] for i in range(5)}
PLANS = [("-padding_free",), ("-chunked_prefill", "-paged_kv"), ("-continuous_batching",), ("speculative",),
         ("paged_kv:block_size=4",), ("length_aware_memory",)]  # fmt: skip


class Operators(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def served(made, *plan, requests=None):
    """Tokens of the prompts without flash_attention, checked to have score matrices and no fused kernel."""
    eng = engine(made, "-flash_attention", *plan, max_num_batched_tokens=16)
    with Operators() as seen:
        got, events = run(eng, *(requests or [ask(k, p) for k, p in PROMPTS.items()]))
    assert not any(e.error for e in events)
    assert {"softmax", "_softmax"} & seen.names
    assert not {name for name in seen.names if "scaled_dot_product" in name}
    assert eng.runner.layout.kernel is None
    return got, events


@pytest.mark.parametrize("name", SERVED)
def test_every_family_chooses_the_same_tokens(name):
    made = model(**ModelSpec.from_config({**SERVED[name], "vocab_size": 300}, name=name).model_dump())
    truth = {(k, 0): greedy(made, p, 8) for k, p in PROMPTS.items()}
    assert served(made)[0] == truth


def test_prompts_of_latent_attention_that_fill_a_step_attend_to_themselves():
    """By keys and values that are expanded, not as beside tokens of the cache."""
    made = model(**ModelSpec.from_config({**SERVED["deepseek_v3"], "vocab_size": 300}, name="d").model_dump())
    prompt = PROMPTS["r2"][:16]
    assert served(made, requests=[ask("a", prompt)])[0] == {("a", 0): greedy(made, prompt, 8)}


@pytest.mark.parametrize("plan", PLANS)
def test_every_schedule_chooses_the_same_tokens(plan):
    made = model()
    truth = {(k, 0): greedy(made, p, 8) for k, p in PROMPTS.items()}
    assert served(made, *plan)[0] == truth


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_quantized_caches_hold_the_same_codes(kind):
    made, plan = model(), f"kv_quant:dtype={kind}"
    truth, _ = run(engine(made, plan, max_num_batched_tokens=16), *[ask(k, p) for k, p in PROMPTS.items()])
    assert served(made, plan)[0] == truth


def test_a_drafting_model_computes_score_matrices_too(tmp_path):
    made = model()
    save_checkpoint(made, tmp_path)
    truth = {(k, 0): greedy(made, p, 8) for k, p in PROMPTS.items()}
    assert served(made, f"speculative:draft={tmp_path},tokens=3")[0] == truth


@pytest.mark.parametrize("plan", [(), ("-flash_attention",)])
def test_a_draft_head_attends_as_the_model_does(plan, tmp_path):
    made = model()
    untrained(made, tmp_path)
    eng = engine(made, f"speculative:draft={tmp_path},tokens=3", *plan)
    assert eng.drafter.propose.runner.layout.fused == eng.runner.layout.fused == (not plan)


def test_kernels_over_pages_are_not_looked_for(monkeypatch):
    """Nor those of a whole step, which this machine may lack."""
    found = []
    for name in ("find_kernel", "find_step_kernel"):
        monkeypatch.setattr(runner, name, lambda *_: found.append(1))
    assert engine(model(), "-flash_attention").runner.layout.whole is None
    assert not found
    engine(model())
    assert len(found) == 2


@pytest.mark.parametrize("plan", [(), ("-padding_free",)])
def test_encoders_embed_the_same(plan):
    made = model("bert-tiny")
    requests = [EngineRequest(k, p[:16], embed=True) for k, p in PROMPTS.items()]
    _, events = served(made, *plan, requests=requests)
    for e in events:
        with torch.inference_mode():
            alone = made(torch.tensor([PROMPTS[e.request][:16]]), return_hidden=True)[0].mean(0)
        torch.testing.assert_close(torch.tensor(e.embedding).to(alone), alone, rtol=1e-6, atol=1e-7)


def test_the_default_plan_has_no_score_matrices():
    with Operators() as seen:
        run(engine(model()), *[ask(k, p) for k, p in PROMPTS.items()])
    assert not {"softmax", "_softmax"} & seen.names
    assert any("scaled_dot_product" in name for name in seen.names)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_holds_no_more_than_what_is_reserved(name, dtype):
    """Of a prompt in two steps, beyond what the same steps hold with fused attention."""
    spec = ModelSpec.from_config({**SERVED[name], "vocab_size": 300}, name=name)
    made = model(**{**spec.model_dump(), "max_positions": 512}).to(dtype)
    prompt, peaks = [(3 * j * j) % 300 for j in range(510)], {}
    for plan in ((), ("-flash_attention",)):
        eng = engine(made, *plan, max_num_batched_tokens=256)
        layer = eng.runner.cache[next(iter(eng.runner.cache))]
        with Meter(made) as meter:
            meter.register((t for kept in eng.runner.pool() for t in kept), "pool")
            run(eng, ask("a", prompt, 1), check=False)
        peaks[plan] = sum(size for kind, size in meter.peak.categories.items() if kind not in ("pool", "parameters"))
    s = Scheduling(limits=Limits(max_num_batched_tokens=256))
    reserved = s.score_bytes(made.spec, 512, dtype.itemsize)
    assert layer.layout.fused is False
    assert 0.4 * reserved < peaks["-flash_attention",] < reserved + peaks[()]


LLAMA = catalog.model("llama3.1-8b")


def sized(free, w=None, **changes):
    """Blocks and longest request of an H100's engine with ``free`` bytes beside the weights, and bytes of a block."""
    s = Scheduling(limits=Limits(), **changes)
    each = s.block_bytes(LLAMA, 32, 8, 2)
    work = Serve(prompt_len=1, output_len=1, **(w or {}))
    return s, each, *s.pool(LLAMA, work, each, free, "gpu", 2)


@pytest.mark.parametrize("length", [2048, 8192, 32768, 131072])
def test_the_pool_leaves_room_for_the_score_matrices_of_the_longest_request(length):
    free = 60e9
    s, each, blocks, longest = sized(free, w={"max_model_len": length})
    used = blocks * each + s.score_bytes(LLAMA, longest, 2)
    assert used <= free
    assert longest <= blocks * s.block_size
    if s.score_bytes(LLAMA, length, 2) < free / 2:
        assert longest == length
        assert used + each > 0.9 * free or blocks == s.limits.max_num_seqs * length // s.block_size
    else:  # no longer one would have room
        assert longest < length
        more = longest + s.block_size
        assert more // s.block_size * each > 0.9 * (free - s.score_bytes(LLAMA, more, 2))
    fused = sized(free, w={"max_model_len": length}, flash=True)
    assert fused[2:] == (min(256 * length // 16, int(0.9 * free / each)), length)


def test_what_was_asked_for_is_not_reduced():
    assert sized(60e9, w={"kv_cache_bytes": 1 << 30})[2] == (1 << 30) // (16 * 131072)


@pytest.mark.parametrize("free", [5e9, 20e9, 60e9])
def test_a_drafting_model_has_a_cache_beside_the_pool(free):
    """As large as the pool, until sixteen of the longest sequences have room."""
    small = catalog.model("llama3.2-1b")
    for length in (8192, 131072):
        given = {"w": {"max_model_len": length}, "flash": True}
        s, each, blocks, _ = sized(free, draft_model=small, **given)
        drafts = s.draft_blocks(length, blocks)
        assert drafts == min(blocks, 16 * length // 16)
        used = blocks * each + drafts * s.draft_block_bytes(2)
        assert 0.9 * free - 2 * each < used <= 0.9 * free
        assert blocks < sized(free, **given)[2]
