"""What a process on a fake GPU must have replaced: a few answers of ``torch.cuda``, kernels that a CPU build of PyTorch
would take apart, checks of a tensor's type, and Triton's launches.

Installed once, in a process of its own, which ends with the trace: nothing is put back.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment,method-assign,misc,attr-defined,return-value"

from __future__ import annotations

import builtins
import contextlib
import importlib
import sys
import types
from collections import Counter

import numpy as np
import torch
import torch.cuda.amp.common as common
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import _TYPES
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ridgeline.measure.fake.tracer import TRACER, answer
from ridgeline.nn.kernels.dispatch import has_float8, has_triton, is_hopper
from ridgeline.nn.model import own_kernels, spans

CAPABILITIES = {"ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0), "blackwell": (10, 0)}
"""By architecture."""
CAPABILITY = (9, 0)
"""Of the device that is stood in for."""
_FREE, _ALL = 76 << 30, 80 << 30
_FEW = 4
"""Numbers of a tensor of integers that is a shape and not codes."""


def install() -> None:
    """Replace them all."""
    _device()
    _streams()
    _questions()
    _fused_kernels()
    _files()
    _modules()
    own_kernels._try = lambda *_: None  # there are no results to compare
    spans._is_right = own_kernels.is_right = lambda *_: True
    if has_triton():
        _triton()


def act_as(architecture: str) -> None:
    """Have kernels chosen as on a GPU of this architecture, Hopper if it is not known."""
    global CAPABILITY
    CAPABILITY = CAPABILITIES.get(architecture.lower(), CAPABILITIES["hopper"])
    has_float8.cache_clear()
    is_hopper.cache_clear()
    if has_triton():
        from triton.runtime import driver

        from ridgeline.nn.kernels.ahead_of_time import Driver

        driver.set_active(Driver(10 * CAPABILITY[0] + CAPABILITY[1]))


class _Unheard:
    """Messages to ranks that are not there."""

    def send(self, _): ...
    def close(self): ...


@contextlib.contextmanager
def first_rank(e):
    """This process as rank 0 of a server, of which the others would say the same."""
    from ridgeline.runtime.mesh import Mesh
    from ridgeline.serve import build_engine, ranks
    from ridgeline.techniques.registry import resolve
    from ridgeline.train.scale import fake_world

    ranks.gathered = lambda value, _=None: [value] * e.world
    ranks.connect, build_engine.host_group = _Unheard, object
    with fake_world(e.world):
        Mesh.make(resolve(e)[0], "cuda")  # which reads its ranks from a tensor, where tensors have data
        yield


def _device() -> None:
    """An H100, as torch.cuda describes it, but for its compute capability."""
    cuda = torch.cuda
    cuda.get_device_capability = lambda *_: CAPABILITY
    cuda.mem_get_info = lambda *_: (_FREE, _ALL)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        total_memory=_ALL, multi_processor_count=132, major=9, minor=0, name="fake H100"
    )
    cuda.get_device_name = lambda *_: "fake H100"
    cuda.max_memory_allocated = cuda.max_memory_reserved = lambda *_: 1
    cuda.reset_peak_memory_stats = lambda *_: None
    cuda.current_device = lambda: 0
    cuda.set_device = lambda _: None
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.synchronize = lambda *_: TRACER.waited("synchronize")
    torch.amp.autocast_mode.amp_definitely_not_available = lambda: False
    common.amp_definitely_not_available = lambda: False
    real = torch.Generator
    torch.Generator = lambda device=None: real()


class _Event:
    at = 0

    def __init__(self, *_, **__): ...
    def synchronize(self): TRACER.waited("event", TRACER.total - self.at)  # fmt: skip

    def query(self): return True  # fmt: skip

    def record(self, *_): self.at = TRACER.total  # fmt: skip


class _Stream:
    def __init__(self, *_, **__): ...
    def wait_stream(self, _): ...
    def wait_event(self, _): ...
    def record_event(self, *_): return _Event()  # fmt: skip

    def synchronize(self): TRACER.waited("stream")  # fmt: skip


class _CUDAGraph:
    kernels: Counter[str]

    def pool(self): return (0, 0)  # fmt: skip

    def replay(self):
        TRACER.launched("graph replay")
        TRACER.replayed += self.kernels


@contextlib.contextmanager
def _graph(into, **_):
    TRACER.recorded = Counter()
    try:
        yield
        into.kernels = TRACER.recorded
    finally:
        TRACER.recorded = None


def _streams() -> None:
    """Streams, events and graphs, which only count."""
    cuda = torch.cuda
    cuda.CUDAGraph, cuda.graph = _CUDAGraph, _graph
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = lambda *_: _Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.set_stream = lambda _: None  # behind a capture that failed
    Tensor.record_stream = lambda *_: None


def _questions() -> None:
    """Tensors' data, and what brings data to the device."""
    plain_list, plain_tensor = Tensor.tolist, torch.tensor

    def tolist(self):
        if not isinstance(self, FakeTensor):
            return plain_list(self)
        if self.device.type == "cuda":
            TRACER.waited("tolist")
        if hasattr(self, "counted"):  # how often each number occurs: about as often as another
            share, rest = divmod(self.counted, len(self))
            return [share + (i < rest) for i in range(len(self))]
        value = answer(self)

        def filled(shape):
            return value if not shape else [filled(shape[1:]) for _ in range(shape[0])]

        return filled(list(self.shape))

    def tensor(data, *args, **kwargs):
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            TRACER.waited("copy to the device")
        return plain_tensor(data, *args, **kwargs)

    def numpy(self, **_):
        return np.zeros(tuple(self.shape), str(self.dtype).removeprefix("torch."))

    FakeTensor.numpy = numpy
    Tensor.tolist = FakeTensor.tolist = tolist
    torch.tensor = tensor
    Tensor.pin_memory = FakeTensor.pin_memory = lambda self, *_: TRACER.pin(self)


def _fused_kernels() -> None:
    """One kernel on CUDA each, which PyTorch chooses in C++ by device: SDPA as on compute capability 9.0, RMS norm."""
    plain_sdpa, plain_rms = F.scaled_dot_product_attention, F.rms_norm

    def sdpa(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if q.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
            q, k, v = (t.to(torch.get_autocast_dtype("cuda")) for t in (q, k, v))
        half, same = q.dtype in (torch.float16, torch.bfloat16), q.shape[1] == k.shape[1]
        masked = attn_mask is not None
        fused = (half and not masked and q.shape[-1] <= 256) or (same and q.shape[-1] % 4 == 0) or (
            half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
        )  # fmt: skip
        if q.device.type != "cuda" or not fused:
            return plain_sdpa(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
                              enable_gqa=enable_gqa)  # fmt: skip
        if not same:
            TRACER.muted += 1
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
            TRACER.muted -= 1
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]

    class Rms(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            TRACER.launched("_fused_rms_norm")
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            TRACER.launched("_fused_rms_norm_backward")
            return torch.empty_like(x), torch.empty_like(w)

    def rms_norm(x, shape, weight=None, eps=None):
        return Rms.apply(x, weight) if x.is_cuda and weight is not None else plain_rms(x, shape, weight, eps)

    F.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention = sdpa
    F.rms_norm = torch.rms_norm = rms_norm


class _File:
    """A checkpoint's file, of which shapes and dtypes are read, and what says how weights are stored."""

    def __init__(self, file, framework):
        self.file = safe_open(file, framework)

    def keys(self):
        return self.file.keys()

    def get_tensor(self, name):
        return self.get_slice(name)[:]

    def get_slice(self, name):
        return _Slice(self.file.get_slice(name))


class _Slice:
    def __init__(self, found):
        self.found = found
        self.get_shape, self.get_dtype = found.get_shape, found.get_dtype

    def __getitem__(self, at):
        few = self.get_shape() and np.prod(self.get_shape()) <= _FEW
        if few and "I" in self.get_dtype():
            with _disable_current_modes():
                return self.found[at]
        whole = torch.empty(self.get_shape(), dtype=_TYPES[self.get_dtype()])
        return whole[at] if whole.dim() else whole


def _files() -> None:
    """Checkpoints."""
    from ridgeline.nn.checkpoint import files

    files.safe_open = _File


def kind(x, *rest):
    """``type``, to which a fake tensor is the tensor that it stands for."""
    if rest:
        return builtins.type(x, *rest)
    if isinstance(x, FakeTensor):
        return nn.Parameter if isinstance(x, nn.Parameter) else Tensor
    return builtins.type(x)


def _modules() -> None:
    """Moving modules without swapping their tensors, models that are filled on the device, and checks of types."""
    from ridgeline.nn.kernels import adjacency
    from ridgeline.nn.model import init

    def moved(self, fn, recurse=True):
        for child in self.children():
            moved(child, fn)
        for held in (self._parameters, self._buffers):
            for name, t in held.items():
                if t is not None:
                    with torch.no_grad():
                        new = fn(t.detach())
                    held[name] = nn.Parameter(new, t.requires_grad) if held is self._parameters else new
        return self

    def adjacent(parts):
        first, at = parts[0], parts[0].storage_offset()
        for p in parts:
            if p.untyped_storage()._cdata != first.untyped_storage()._cdata or p.storage_offset() != at:
                return None
            at += p.numel()
        rows = sum(p.shape[0] for p in parts)
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())

    def init_weights(model, seed):
        """Nothing: what is in them is not asked for."""

    def allocate(model, device, dtype):
        moved(model, lambda t: torch.empty(t.shape, dtype=dtype if t.is_floating_point() else t.dtype, device=device))
        model.tie()

    def use_sparse_cores(model):
        """Nothing: whether weights are 2:4 sparse is in their numbers."""

    # Techniques import them when they are applied.
    for name in ("model.fused_loss", "parallel.divide_packed", "quant.packed_model"):
        importlib.import_module(f"ridgeline.nn.{name}")
    nn.Module._apply = moved
    adjacency.adjacent = adjacent
    init.init_weights, init.allocate = init_weights, allocate
    for name, module in list(sys.modules.items()):
        if name.startswith("ridgeline.") and not name.startswith("ridgeline.measure.fake"):
            for what in (init_weights, allocate, use_sparse_cores):
                if what.__name__ in vars(module):
                    setattr(module, what.__name__, what)
            if getattr(module, "Tensor", None) is Tensor or "torch" in vars(module):
                module.type = kind


def _triton() -> None:
    """Launches, whose tensors must be on the device."""
    from triton.runtime.jit import JITFunction

    def run(self, *args, grid, warmup=False, **options):
        TRACER.launched(self.fn.__name__.lstrip("_"))
        for t in (*args, *options.values()):
            if isinstance(t, Tensor) and t.device.type != "cuda":
                TRACER.wrong[f"the Triton kernel {self.fn.__name__} was given a tensor on the host"] += 1

    JITFunction.run = run
