"""The back ends of operators beside one another, as `ridgeline probe` times them on a GPU: in small on the CPU."""

import pytest
import torch
from tests.nn.interpreter import DEVICE

from ridgeline.measure.probing import gpu_backends
from ridgeline.measure.probing.gpu_backends import SMALL, backend_rows
from ridgeline.measure.probing.probe import backend_seconds
from ridgeline.nn.kernels import functions, native
from ridgeline.nn.kernels.backends import Backend
from ridgeline.nn.kernels.paged_attention import paged_attention
from ridgeline.report.console import device_table
from ridgeline.spec.backends import BACKENDS, OURS, checked, order
from ridgeline.spec.device import Device
from ridgeline.spec.errors import UserError


class Norms:
    @staticmethod
    def add_norm(x, update, weight, eps):
        return functions.add_norm(x, update, weight, None, eps, False, x.dtype)


class Off:
    @staticmethod
    def add_norm(x, update, weight, eps):
        return functions.add_norm(x, update, weight, None, eps + 0.3, False, x.dtype)


def loss(x, weight, bias, labels):
    raise RuntimeError("an illegal access\nwith more lines")


def attend(q, keys, values, pages, window):
    return paged_attention(q, keys, values, pages, window)


THEIRS = {
    "norm": {"liger": Norms, "flash-attn": Off}, "head_loss": {"liger": loss},
    "attention.decode": {"torch": attend}, "attention.prefill": {"flash-attn-3": attend},
    "float8": {"operators": None}, "experts": {"operators": None}, "dense": {"operators": None},
    "adapters": {"operators": None},
}  # fmt: skip


@pytest.fixture
def rows(monkeypatch):
    """Measured with some that are right, one that is wrong and one that fails; one takes pages of 256 tokens only."""

    def able(operator, case):
        return [Backend(name, "torch", "torch", lambda f=f: f, lambda case: "")
                for name, f in THEIRS.get(operator, {}).items() if name != "torch" or case.block == 256]  # fmt: skip

    if DEVICE == "cpu" and native.library() is None:
        pytest.skip("there is no compiler for the CPU's kernels, which stand for ours")
    monkeypatch.setattr(gpu_backends, "able", able)
    monkeypatch.setattr(gpu_backends, "_CALLS", 2)
    return list(backend_rows(torch.device(DEVICE), SMALL, lambda stage: None))


def test_those_that_are_right_are_timed(rows):
    found = backend_seconds(rows)
    assert found.keys() == BACKENDS.keys()
    assert {o: set(held) for o, held in found.items()} == {
        "norm": {OURS, "liger"}, "swiglu": {OURS}, "head_loss": {OURS},
        "attention.decode": {OURS, "torch"}, "attention.prefill": {OURS, "flash-attn-3"},
        "float8": {OURS, "operators"}, "experts": {OURS, "operators"}, "dense": {OURS, "operators"},
        "adapters": {OURS, "operators"},
    }  # fmt: skip
    assert all(s > 0 for held in found.values() for s in held.values())
    failed = {(r["operator"], r["backend"]): r["failed"] for r in rows if "failed" in r}
    assert failed.keys() == {("norm", "flash-attn"), ("head_loss", "liger")}
    assert "its error is" in failed["norm", "flash-attn"]
    assert failed["head_loss", "liger"] == "RuntimeError: an illegal access"


def test_a_profile_shows_what_is_taken(capsys):
    held = {"norm": {OURS: 2e-3, "liger": 1e-3}}
    device = Device(name="local", peak_flops={"bf16": 1e15}, memory_bytes=8e10, memory_bandwidth=3e12, kernels=held)
    device_table(device)
    shown = capsys.readouterr().out
    line = next(x for x in shown.splitlines() if "liger" in x)
    assert "1.00 ms" in line
    assert "taken" in line
    assert shown.count("taken") == 1
    assert order("norm", held["norm"])[0] == "liger"
    assert order("norm", {}) == list(BACKENDS["norm"])


def test_what_a_workload_may_ask_for():
    assert checked({"attention": "flashinfer"}) == {"attention.prefill": "flashinfer"}
    within = {"attention": {"decode": "torch"}, "norm": "liger"}
    assert checked(within) == {"attention.decode": "torch", "norm": "liger"}
    for step in (1, -1):  # whatever comes first, a name of one operator means more than one of several
        asked = dict([("attention", "torch"), ("attention.prefill", "flashinfer")][::step])
        assert checked(asked) == {"attention.decode": "torch", "attention.prefill": "flashinfer"}
    with pytest.raises(UserError, match="unknown operator 'nrm' in kernels"):
        checked({"nrm": "liger"})
    with pytest.raises(UserError, match="unknown back end of norm 'ligr' in kernels"):
        checked({"norm": "ligr"})
