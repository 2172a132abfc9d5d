"""What a server's start must not spend time on."""

import json
import subprocess
import sys

import pytest
import torch
from tests.compressing import LLAMA, checkpoint

from ridgeline.experiments import make
from ridgeline.nn.kernels import dispatch
from ridgeline.nn.quant.packed_model import load_packed, pack_head
from ridgeline.runtime.solve.grid import Affine
from ridgeline.serve import build_engine, ranks
from ridgeline.serve.build_engine import DEFAULT_PLAN, default_dtype, load_engine
from ridgeline.spec.errors import UserError

SLOW = ("torch.distributed.tensor", "sympy", "torch._dynamo", "transformers", "scipy")


def test_modules_that_take_long_are_not_imported():
    code = f"import sys, ridgeline.serve.build_engine; print(*[m for m in {SLOW} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_mapped_weights_are_those_that_are_read(tmp_path):
    source = checkpoint(tmp_path, LLAMA, dtype=torch.bfloat16)
    before = (tmp_path / "model.safetensors").read_bytes()
    read, mapped = (load_packed(source, torch.bfloat16, mapped=m) for m in (False, True))
    assert read.mapped_bytes == 0
    assert mapped.mapped_bytes == sum(p.nbytes for p in mapped.parameters())
    coded = load_packed(source, torch.bfloat16, mapped=True)
    weight = coded.head.out.weight.detach()
    pack_head(coded, Affine(8).fit(weight.float()).pack(weight.float()), torch.device("cpu"))
    assert coded.mapped_bytes == mapped.mapped_bytes - weight.nbytes
    for (name, a), b in zip(read.named_parameters(), mapped.parameters(), strict=True):
        assert torch.equal(a, b), name
    with torch.no_grad():
        for p in mapped.parameters():
            p.add_(1)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert load_packed(source, torch.float32, mapped=True).mapped_bytes == 0  # which must be converted


def test_a_pool_takes_memory_when_it_is_used(tmp_path):
    engine = load_engine(checkpoint(tmp_path, LLAMA), kv_cache_bytes=1 << 32, max_model_len=64)
    assert engine.blocks.count > 1 << 16
    assert not engine.runner.pool()[0][0][:, :, -1].any()


@pytest.mark.parametrize("able", [True, False])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_weights_in_bf16_stay_so_where_the_cpu_multiplies_it(tmp_path, monkeypatch, able, stored):
    monkeypatch.setattr(build_engine, "multiplies_bf16", lambda: able)
    source = checkpoint(tmp_path, LLAMA, dtype=stored)
    low = able and stored is torch.bfloat16
    assert default_dtype(source) == ("bf16" if low else "auto")
    engine = load_engine(source, max_model_len=64, kv_cache_bytes=1 << 20)
    assert engine.runner.pool()[0][0].dtype is (torch.bfloat16 if low else torch.float32)
    if low:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))
        assert default_dtype(source) == "auto"


def test_the_tokenizer_is_read_while_the_engine_starts(tmp_path, monkeypatch):
    """The other process loads the model meanwhile; it is not needed here."""
    from typer.testing import CliRunner

    from ridgeline.cli.base import app
    from ridgeline.serve import remote_engine, server

    seen = []

    class Starting:
        def __init__(self, *_):
            seen.append("started")

        def wait_ready(self):
            seen.append("waited")
            raise UserError("that is all", "stop here")

        def close(self):
            return True

    read = server.read_vocabulary
    monkeypatch.setattr(server, "read_vocabulary", lambda *a: seen.append("read") or read(*a))
    monkeypatch.setattr(remote_engine, "RemoteEngine", Starting)
    result = CliRunner().invoke(app, ["serve", str(checkpoint(tmp_path, LLAMA)), "--engine-process"])
    assert isinstance(result.exception, UserError)
    assert seen == ["started", "read", "waited"]


@pytest.mark.parametrize(("capability", "old"), [((7, 0), True), ((7, 5), True), ((8, 0), False), ((12, 0), False)])
def test_gpus_before_ampere_compute_in_fp16_without_triton(tmp_path, capability, old, monkeypatch):
    source = checkpoint(tmp_path, LLAMA)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: name)
    assert default_dtype(source) == ("fp16" if old else "auto")
    assert dispatch.has_triton.__wrapped__() == (not old)


def test_a_plan_for_more_gpus_than_there_are_is_refused(monkeypatch):
    """It was served on the CPU without a word."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    e = make("llama3.1-8b", "4xh100-sxm", {"kind": "serve", "prompt_len": 8, "output_len": 8},
             ["tensor_parallel:degree=4", *DEFAULT_PLAN])  # fmt: skip
    with pytest.raises(UserError, match="over 4 GPUs, and this process sees 2"):
        ranks.start(e)
