"""Linear layers that compute from low-bit weights: few rows directly from them, many from a dequantized weight.

Two ways to compute. *Exact* dequantizes to fp32: the reference. *Fast* is what is fastest on the hardware: on a CPU our
compiled kernels (:mod:`ridgeline.nn.quant.native_codes`), or PyTorch's where there is no compiler. Activations are
quantized to few bits only where an :class:`InputCode` is given, in both ways alike.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.nn.kernels import native
from ridgeline.nn.quant.activation_quant import InputCode, code_input, fake_quantize
from ridgeline.nn.quant.codes import Codes, Stripes, Words, bare
from ridgeline.nn.quant.native_codes import NativeCodes
from ridgeline.nn.quant.packed import Packed
from ridgeline.nn.quant.torch_codes import torch_form
from ridgeline.spec.lowbit import held


def make_codes(packed: Packed, device: torch.device, fast: bool = True) -> Codes:
    """What :func:`ridgeline.spec.lowbit.held` says this weight is held as."""
    form = held(*packed.shape, packed.bits, packed.group_size, device.type, fast)
    if form == "stripes":
        return Stripes(packed)
    if form == "words":
        return Words(packed)
    return NativeCodes(packed, 8 if form == "bytes" else 4) if native.library() is not None else torch_form(packed)


class PackedLinear(nn.Module):
    """A linear layer that holds only quantized weights. The record it is created from need not be kept."""

    def __init__(
        self, packed: Packed, bias: Tensor | None = None, input: InputCode | None = None, fast: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """``bias`` [out]. ``input``: how inputs are quantized; None: not. ``fast``: see the module."""
        super().__init__()
        device = torch.device(device)
        self.out_features, self.in_features = packed.shape
        self.bits, self.group_size, self.input, self.fast = packed.bits, packed.group_size, input, fast
        self.codes = make_codes(packed, device, fast).to(device)
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(device), requires_grad=False)
        self.aside: nn.Parameter | None = None
        """Values of the outliers, which ``_aside`` stores in rows."""
        if packed.outliers is not None and packed.outliers.index.numel():
            index, values = packed.outliers.index.long(), packed.outliers.values.float()
            self._keep_aside(torch.stack((index // self.in_features, index % self.in_features)), values, device)

    def _keep_aside(self, at: Tensor, values: Tensor, device: torch.device) -> None:
        """Store the outliers ``at`` [2, k] (rows, columns) in full precision."""
        shape = (self.out_features, self.in_features)
        self._aside = torch.sparse_coo_tensor(at, values, shape, device=device, check_invariants=False).coalesce()
        self.aside = nn.Parameter(self._aside.values(), requires_grad=False)
        self.places = nn.Parameter(self._aside.indices(), requires_grad=False)

    def part(self, dim: int, at: int, of: int) -> PackedLinear:
        """Part ``at`` of ``of`` equal ones: of the outputs (``dim`` 0), with their biases, or of the inputs (1),
        without the bias; nothing is rounded again. A part of the inputs is quantized by its own largest magnitude.

        Raises :class:`Incompatible` where the kernel that reads the codes cannot read such a part.
        """
        size = (self.out_features, self.in_features)[dim] // of
        start, stop = at * size, (at + 1) * size
        new = bare(self)
        new.codes = self.codes.part(dim, start, stop)
        new.out_features, new.in_features = new.codes.out, new.codes.width
        own = self.bias if dim == 0 else None
        new.bias = None if own is None else nn.Parameter(own[start:stop].clone(), requires_grad=False)
        new.aside = None
        if self.aside is not None:
            places = self._aside.indices()
            inside = (places[dim] >= start) & (places[dim] < stop)
            if inside.any():
                moved = places[:, inside].clone()
                moved[dim] -= start
                new._keep_aside(moved, self._aside.values()[inside], places.device)
        return new

    def dense(self) -> Tensor:
        """The weight [out, in] in fp32, as used in computation."""
        weight = self.codes.rows(0, self.out_features, torch.float32)
        return weight if self.aside is None else weight + self._aside.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out], in the dtype of ``x``."""
        rows = x.reshape(-1, self.in_features)
        if self.input is None and self.fast and self.aside is None:
            return self.codes.linear(rows, self.bias).view(*x.shape[:-1], self.out_features)
        if self.input is None:
            y = self.codes.product(rows) if self.fast else self.codes.expanded(rows, torch.float32)
        else:
            y = self._coded(rows, self.input)
        if self.aside is not None:
            y += torch.sparse.mm(self._aside, rows.float().t()).t()
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _coded(self, x: Tensor, code: InputCode) -> Tensor:
        """The product with inputs rounded to integers; wide ones are taken out and multiplied as they are (LLM.int8,
        arXiv:2208.07339, section 3)."""
        x = x.float()
        if not self.fast:
            return self.codes.expanded(fake_quantize(x, code), torch.float32)
        codes, scale, wide = code_input(x, code)
        y = self.codes.integer_product(codes).mul_(scale)
        if wide is not None and bool(wide.any()):
            index = wide.nonzero().squeeze(1)
            y.addmm_(x[:, index], self.codes.columns(index).t())
        return y
