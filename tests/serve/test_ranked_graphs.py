"""Captured steps of a divided model on two gloo ranks: the tokens of steps that are launched operator by operator, the
same steps on all ranks, and what one rank cannot capture, no rank replays.

A recorder stands for CUDA graphs (tests/gpu/test_graphs.py): it runs the same operators and sums again.
"""

import math
import warnings
from datetime import timedelta

import pytest
import torch
from tests.gpu.test_graphs import Recorder, drafted, reference, requests
from tests.serve.test_divided import SERVED, TP, experiment
from tests.serving import run
from tests.world import world

from ridgeline.nn.kernels import native, paged_store
from ridgeline.nn.model.moe import Experts
from ridgeline.serve import agreed_capture, build_engine, runner, step_graphs
from ridgeline.serve.drafting import Drafting
from ridgeline.spec.errors import UserError

CPU = torch.device("cpu")
WIDE = torch.float64
MIXTURE = {"num_experts": 4, "experts_per_token": 2}


class Failing(Recorder):
    """Cannot do one of its two parts for steps in ``where``: decode, prompts or all."""

    def __init__(self, part, where):
        super().__init__()
        self.part, self.where = part, where

    def run_first(self, run):
        super().run_first(run)  # so that the sums of the other rank end
        self.tried("run_first", run)

    def record(self, run):
        self.tried("record", run)
        return super().record(run)

    def tried(self, part, run):
        size = dict(zip(run.__code__.co_freevars, (c.cell_contents for c in run.__closure__), strict=True))["size"]
        if part == self.part and self.where in ("all", "prompts" if size.prompts else "decode"):
            raise RuntimeError("CUDA out of memory")


def serving(rank, e, graphs, failing=(), where=""):
    """Of rank 0 (tokens, captured sizes, replayed sizes, warnings), of others the same without tokens; or what it says.
    ``failing``: ranks and the part in which they fail; steps ``where`` they do. With ``where`` sizes, those ranks would
    capture other ones."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        on_gpu(patch, graphs, dict(failing).get(rank), where)
        try:
            made = build_engine.make_follower(e, CPU) if rank else build_engine.make_engine(e, CPU)
        except UserError as refusal:
            return refusal.what
        ranked = made if rank else made.runner
        held = ranked.graphs.graphs if ranked.graphs else {}
        sizes, replayed = list(held), []
        if sizes:
            plain = ranked.graphs.run
            ranked.graphs.run = lambda step, size: replayed.append((counts(step), size)) or plain(step, size)
        heard = [str(w.message) for w in said if "CUDA graphs" in str(w.message)]
        if rank:
            ranked.follow()
            assert not held  # NCCL would wait for them
            return sizes, replayed, heard
        if made.drafter is not None:
            made.drafter = Drafting(drafted, 3)
            made.drafter.observe = lambda *_: None  # which would switch them off by the clock
        tokens = run(made, *requests())[0]
        made.close()
        assert not held
        return sizes, replayed, heard, tokens


def counts(step):
    """New tokens of each of its sequences."""
    return [p.stop - p.start for p in step.pieces]


def on_gpu(patch, graphs, part, where):
    """Have an engine built as on a GPU, with the recorder; in fp64, which grouped products do not have."""
    patch.setattr(native, "library", lambda: None)
    patch.setattr(Experts, "groupable", lambda *_: True)
    patch.setattr(step_graphs, "most_tokens_at_once", lambda _: math.inf if where != "sizes" or part is None else 8)
    patch.setattr(runner, "find_step_kernel", lambda *_: reference)
    patch.setattr(paged_store, "store_tokens", lambda *_: False)
    patch.setattr(build_engine, "CudaCapture", lambda: Failing(part, where))
    build, make = build_engine.build, build_engine._runner
    patch.setattr(build_engine, "build", lambda m, *rest: build(m, *rest).to(WIDE if not m.num_experts else None))

    def runner_on_gpu(run, blocks):
        run.device = torch.device("cuda" if graphs else "cpu")
        return make(run, blocks)

    patch.setattr(build_engine, "_runner", runner_on_gpu)


def plan(*more, **model):
    return experiment("paged_kv:block_size=4", *SERVED[1:], TP, *more, model=model, max_num_seqs=4,
                      max_num_batched_tokens=20, kv_cache_bytes=1 << 16)  # fmt: skip


@pytest.fixture(scope="module")
def wanted():
    """Tokens of the plan, launched operator by operator."""
    sizes, replayed, heard, tokens = world(2).run(serving, plan(), False)[0]
    assert sizes == replayed == heard == []
    return tokens


def test_replayed_steps_of_ranks_give_the_same_tokens(wanted):
    (sizes, replayed, heard, tokens), follower = world(2).run(serving, plan(), True)
    assert tokens == wanted
    assert follower == (sizes, replayed, heard)
    assert heard == []
    decoding = [(sum(new), size.tokens) for new, size in replayed if not size.prompts]
    assert {1, 3, 4} <= {n for n, _ in decoding}
    assert (3, 4) in decoding  # with a pad
    prompts = [(sum(new), size.tokens) for new, size in replayed if size.prompts]
    assert {n == most for n, most in prompts} == {True, False}


def test_replayed_steps_of_divided_experts_give_the_same_tokens():
    e = plan(**MIXTURE)
    (sizes, replayed, _, tokens), follower = world(2).run(serving, e, True)
    assert tokens == world(2).run(serving, e, False)[0][3]
    assert follower[:2] == (sizes, replayed)
    assert len(replayed) > 10


def test_replayed_steps_of_ranks_check_drafts(wanted):
    (sizes, replayed, _, tokens), follower = world(2).run(serving, plan("speculative:tokens=3"), True)
    assert tokens == wanted
    assert follower[:2] == (sizes, replayed)
    checked = [size for new, size in replayed if 1 < max(new) <= 4]  # a draft and the token before it
    assert len(checked) > 3
    assert any(size.decoding for size in checked)


@pytest.mark.parametrize("failing", [0, 1])
def test_no_rank_replays_what_one_cannot_capture(failing, wanted):
    (sizes, replayed, heard, tokens), follower = world(2).run(serving, plan(), True, {failing: "record"}, "all")
    assert (sizes, replayed, tokens) == ([], [], wanted)
    assert follower == ([], [], [])
    assert len(heard) == 2  # those with prompts were given up first
    assert f"rank {failing}: CUDA out of memory" in heard[-1]


@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_give_up_steps_with_prompts(failing, wanted):
    (sizes, replayed, heard, tokens), follower = world(2).run(serving, plan(), True, {failing: "record"}, "prompts")
    assert tokens == wanted
    assert sizes
    assert not any(size.prompts for size in sizes)
    assert len(replayed) > 10
    assert follower == (sizes, replayed, [])
    (said,) = heard
    assert said.startswith("steps with prompts run without CUDA graphs")


def test_a_step_that_fails_on_all_ranks_is_not_captured(wanted):
    both = {0: "run_first", 1: "run_first"}
    first, second = world(2).run(serving, plan(), True, both, "prompts")
    assert first[3] == wanted
    assert first[:2] == second[:2]
    assert not any(size.prompts for size in first[0])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_in_a_step_ends_all(failing):
    """On GPUs the others would wait for its sums."""
    said = world(2).run(serving, plan(), True, {failing: "run_first"}, "decode")
    assert said[0] == said[1] == f"a step failed while the engine started, on rank {failing}: CUDA out of memory"


def alone(rank, e, fails, how):
    """What is raised on each rank where one of them ``fails`` as only it does: its type, and what it says."""

    def fail(*_):
        raise (TypeError if how == "a mistake" else RuntimeError)("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        on_gpu(patch, True, "run_first" if how == "after other sums" else None, "all")
        patch.setattr(agreed_capture, "COMPILING", timedelta(seconds=2))  # a process that ends is seen at once
        if how == "after other sums":
            sums = iter([0, rank])
            patch.setattr(agreed_capture.AgreedCapture, "_sums", lambda _: next(sums))
        elif how != "a mistake":
            patch.setattr(Failing, "run_first", lambda *_: None)  # as on a GPU, where the host does not wait for sums
        if rank == fails:
            where = (Failing, "tried") if how == "a mistake" else (step_graphs.StepGraphs, "_with_prompts")
            patch.setattr(*where, fail)
        try:
            build_engine.make_follower(e, CPU) if rank else build_engine.make_engine(e, CPU)
        except Exception as error:
            assert not [w for w in heard if "CUDA graphs" in str(w.message)]
            return type(error).__name__, getattr(error, "what", str(error))
    return None


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("how", ["a mistake", "before it is captured"])
def test_a_rank_that_alone_cannot_go_on_ends_all(how, fails):
    said = world(2).run(alone, plan(), fails, how)
    assert said[fails] == ("TypeError" if how == "a mistake" else "RuntimeError", "CUDA out of memory")
    kind, what = said[1 - fails]
    assert kind == "UserError"
    expected = f"a step failed while the engine started, on rank {fails}: CUDA" if how == "a mistake" else "a rank was"
    assert what.startswith(expected)


def test_ranks_that_fail_behind_different_sums_end():
    """The next sums of one would be added to others of the other."""
    what = "a step failed while the engine started, on rank 0: CUDA out of memory"
    assert world(2).run(alone, plan(), None, "after other sums") == [("UserError", what)] * 2


def test_ranks_that_would_capture_other_steps_capture_none(wanted):
    (sizes, replayed, heard, tokens), follower = world(2).run(serving, plan(), True, {1: ""}, "sizes")
    assert (sizes, replayed, tokens) == ([], [], wanted)
    assert follower == ([], [], [])
    assert heard == ["steps run without CUDA graphs: their ranks would capture different ones"]
