"""Forward operators of a transformer, module by module, with the backward operators and saved activations they imply.

The rules for what autograd saves are those of the torch model (:mod:`ridgeline.nn`): a matrix multiplication saves its
input, a normalization its input and its statistics, softmax its output, a gated activation its gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.graph.graph import Block, Direction, Op, Param, Role, Saved
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.model import ModelSpec


def distinct_experts(experts: int, rows: int) -> float:
    """Expected number of experts that ``rows`` routed rows reach when their popularity is uneven.

    Popularities are assumed to be exponentially distributed, which gives e · (1 - 1 / (1 + r/e)) of e experts: small
    batches rarely reach one twice, medium ones reach a fifth fewer than under even routing (as measured decoding times
    show).
    """
    return experts * (1 - 1 / (1 + rows / experts))


@dataclass(slots=True)
class Builder:
    """Accumulates one block. ``tokens`` = batch × q_len; ``kv_len`` is the context each query sees."""

    spec: ModelSpec
    batch: int
    q_len: int
    kv_len: int
    dtype: str
    training: bool
    block: Block

    @property
    def tokens(self) -> int:
        """Number of rows of every linear layer."""
        return self.batch * self.q_len

    @property
    def width(self) -> float:
        """Bytes of one activation element."""
        return DTYPE_BYTES[self.dtype]

    # ---- elementary operators -----------------------------------------------------------------------------------

    def param(self, name: str, shape: tuple[int, ...]) -> None:
        """Register a parameter tensor."""
        numel = 1
        for d in shape:
            numel *= d
        self.block.params.append(
            Param(name, numel, dtype=self.dtype, bytes_per_element=self.width, grad_bytes=self.width, shape=shape)
        )  # fmt: skip

    def save(self, name: str, elements: float, users: list[str], width: float | None = None) -> None:
        """Save an activation for backward, for the backward operators ``users``."""
        if not self.training:
            return
        old = self.block.saved.get(name)
        merged = frozenset(users) | (old.users if old else frozenset())
        size = elements * (self.width if width is None else width)
        self.block.saved[name] = Saved(size, merged)

    def linear(self, name: str, module: str, m: int, n: int, k: int, source: str, *, bias: bool = False,
               weight: str = "", shared: bool = False, experts: int = 1) -> None:  # fmt: skip
        """y[m,n] = x[m,k] · W[n,k]ᵀ, and its input- and weight-gradient GEMMs. ``source`` names the saved input x."""
        weight = weight or f"{name}.weight"
        if not shared:
            self.param(weight, (experts, n, k) if experts > 1 else (n, k))
            if bias:
                self.param(f"{name}.bias", (n,))
        flops = 2.0 * m * n * k
        touched = distinct_experts(experts, m) if experts > 1 else 1.0
        traffic = (m * k + m * n + n * k * touched) * self.width

        def product(suffix: str, direction: Direction, shape: tuple[int, int, int], role: Role = "") -> Op:
            return Op(f"{name}{suffix}", module, "gemm", direction, flops, traffic, self.dtype, shape, weight,
                      experts=touched, role=role)  # fmt: skip

        self.block.forward.append(product("", "forward", (m, n, k)))
        if not self.training:
            return
        # The weight gradients of several experts are separate products, each with its expert's number of rows as k.
        deep = (round(n * touched), k, max(1, round(m / touched))) if experts > 1 else (n, k, m)
        grads = [product(".dx", "backward", (m, k, n)), product(".dw", "backward", deep, "weight_gradient")]
        earlier = self.block.saved.get(source)
        if earlier and any(user.endswith(".dw") for user in earlier.users):
            # Another linear reads the same input: their input gradients are added.
            add = 3.0 * m * k * self.width
            grads.append(Op(f"{name}.accumulate", module, "residual", "backward", 0, add, self.dtype))
        if bias:
            size = m * n * self.width
            grads.append(Op(f"{name}.db", module, "reduce", "backward", 0, size, self.dtype, param=f"{name}.bias",
                            role="bias_gradient"))  # fmt: skip
        self.block.backward.extend(grads)
        self.save(source, m * k, [f"{name}.dw"])

    def pointwise(self, name: str, module: str, kind: str, read: float, write: float, back_read: float,
                  back_write: float) -> None:  # fmt: skip
        """An elementwise or reduction operator: elements read and written, forward and backward."""
        w = self.width
        self.block.forward.append(Op(name, module, kind, bytes=(read + write) * w, dtype=self.dtype))
        if self.training:
            moved = (back_read + back_write) * w
            self.block.backward.append(Op(f"{name}.bwd", module, kind, "backward", 0, moved, self.dtype))

    def norm(self, name: str, source: str, size: int, rows: int | None = None, module: str = "norm") -> None:
        """RMSNorm or LayerNorm over ``size``: saves its input and one (two) statistics per row."""
        rows = self.tokens if rows is None else rows
        self.param(f"{name}.weight", (size,))
        if self.spec.norm == "layernorm" and self.spec.norm_bias and module == "norm":
            self.param(f"{name}.bias", (size,))
        n = rows * size
        self.pointwise(name, module, "norm", n, n, 2 * n, n)
        self.save(source, n, [f"{name}.bwd"])
        self.save(f"{name}.stats", rows * (2 if self.spec.norm == "layernorm" else 1), [f"{name}.bwd"], 4.0)

    def residual(self, name: str) -> None:
        """x + f(x). Autograd adds the two gradient paths in backward; dropout on f(x) keeps a mask of one byte."""
        n = self.tokens * self.spec.hidden_size
        self.pointwise(name, "residual", "residual", 2 * n, n, 2 * n, n)
        if self.spec.dropout:
            self.save(f"{name}.mask", n, [f"{name}.bwd"], 1.0)

    # ---- modules ------------------------------------------------------------------------------------------------

    def attention(self, prefix: str, source: str, *, cross: bool = False) -> None:
        """Projections, rotary embedding, scores, softmax, values, output projection (unfused)."""
        s, t, m = self.spec, self.tokens, "attention"
        h, q, kv, d = s.hidden_size, s.q_size, s.kv_size, s.head_dim
        kv_rows = self.batch * self.kv_len if cross else t
        self.linear(f"{prefix}.q_proj", m, t, q, h, source, bias=s.qkv_bias)
        kv_source = "encoder_output" if cross else source
        self.linear(f"{prefix}.k_proj", m, kv_rows, kv, h, kv_source, bias=s.qkv_bias)
        self.linear(f"{prefix}.v_proj", m, kv_rows, kv, h, kv_source, bias=s.qkv_bias)
        if s.qk_norm:
            for part, width, heads in (("q", q, s.num_heads), ("k", kv, s.num_kv_heads)):
                size, rows = (width, t) if s.joint_qk_norm else (d, t * heads)
                self.norm(f"{prefix}.{part}_norm", f"{prefix}.{part}_raw", size, rows, m)
        if s.attention_sinks:
            self.param(f"{prefix}.sinks", (s.num_heads,))
        if s.position == "rope":
            for part, n in (("q", t * q), ("k", t * kv)):
                self.pointwise(f"{prefix}.{part}_rope", m, "rope", n, n, n, n)
        b, hq, sq, sk = self.batch, s.num_heads, self.q_len, self.kv_len
        scores = float(b * hq * sq * sk)
        flops = 2.0 * scores * d
        w = self.width
        qk = (b * hq * sq * d + b * s.num_kv_heads * sk * d + scores) * w
        shape = (b * hq, sq, sk, d)
        fwd, bwd = self.block.forward, self.block.backward
        fwd.append(Op(f"{prefix}.scores", m, "bmm", flops=flops, bytes=qk, dtype=self.dtype, shape=shape))
        if s.attention_soft_cap is not None:
            self.pointwise(f"{prefix}.soft_cap", m, "activation", scores, scores, 2 * scores, scores)
            self.save(f"{prefix}.capped", scores, [f"{prefix}.soft_cap.bwd"])
        added = 2 if s.position == "alibi" else 1  # its bias is another addition
        fwd.append(Op(f"{prefix}.mask", m, "mask", bytes=2 * added * scores * w, dtype=self.dtype))
        drop = (2 * w + 1) * scores if s.dropout else 0.0  # probabilities read and written again, with their mask
        fwd.append(Op(f"{prefix}.softmax", m, "softmax", bytes=2 * scores * w + drop, dtype=self.dtype))
        fwd.append(Op(f"{prefix}.values", m, "bmm", flops=flops, bytes=qk, dtype=self.dtype, shape=(b * hq, sq, d, sk)))
        if self.training:

            def product(name: str, shape: tuple[int, ...]) -> Op:
                return Op(f"{prefix}.{name}", m, "bmm", "backward", flops, qk, self.dtype, shape)

            bwd.append(product("values.dprobs", shape))
            bwd.append(product("values.dv", (b * hq, sk, d, sq)))
            bwd.append(Op(f"{prefix}.softmax.bwd", m, "softmax", "backward", 0, 3 * scores * w + drop, self.dtype))
            bwd.append(product("scores.dq", (b * hq, sq, d, sk)))
            bwd.append(product("scores.dk", (b * hq, sk, d, sq)))
            kv_elements = b * sk * kv
            self.save(f"{prefix}.q", b * sq * q, [f"{prefix}.scores.dk"])
            self.save(f"{prefix}.k", kv_elements, [f"{prefix}.scores.dq"])
            self.save(f"{prefix}.v", kv_elements, [f"{prefix}.values.dprobs"])
            self.save(f"{prefix}.probs", scores, [f"{prefix}.values.dv", f"{prefix}.softmax.bwd"])
            if s.dropout:  # its mask, and the probabilities that remain (arXiv:2205.05198, section 4.1)
                self.save(f"{prefix}.probs.mask", scores, [f"{prefix}.softmax.bwd"], 1.0)
                self.save(f"{prefix}.probs.dropped", scores, [f"{prefix}.values.dv"])
        self.linear(f"{prefix}.o_proj", m, t, h, q, f"{prefix}.context", bias=s.out_bias)
        self.block.workspace = max(self.block.workspace, 2 * scores * w)
        self.block.backward_workspace = max(self.block.backward_workspace, 2 * scores * w)

    def mlp(self, prefix: str, source: str) -> None:
        """Dense MLP, gated or not."""
        s, t = self.spec, self.tokens
        h, f = s.hidden_size, s.intermediate_size
        if s.gated:
            self.linear(f"{prefix}.gate_proj", "mlp", t, f, h, source, bias=s.mlp_bias)
        self.linear(f"{prefix}.up_proj", "mlp", t, f, h, source, bias=s.mlp_bias)
        self._activation(prefix, t * f)
        self.linear(f"{prefix}.down_proj", "mlp", t, h, f, f"{prefix}.inner", bias=s.mlp_bias)

    def moe(self, prefix: str, source: str) -> None:
        """Mixture of experts: router, dispatch, grouped GEMMs over top-k tokens, weighted combine."""
        s, t = self.spec, self.tokens
        h, f, e, k = s.hidden_size, s.intermediate_size, s.num_experts, s.experts_per_token
        self.linear(f"{prefix}.router", "mlp", t, e, h, source)
        self.pointwise(f"{prefix}.routing", "mlp", "softmax", t * e, t * e, 2 * t * e, t * e)
        self.save(f"{prefix}.routing", t * e + 4 * t * k, [f"{prefix}.routing.bwd"], 4.0)
        rows = t * k
        self.pointwise(f"{prefix}.dispatch", "mlp", "copy", rows * h, rows * h, rows * h, rows * h)
        experts = f"{prefix}.experts"
        if s.gated:
            self.linear(f"{experts}.gate_proj", "mlp", rows, f, h, f"{prefix}.dispatched",
                        weight=f"{experts}.gate_proj", experts=e)  # fmt: skip
        self.linear(f"{experts}.up_proj", "mlp", rows, f, h, f"{prefix}.dispatched",
                    weight=f"{experts}.up_proj", experts=e)  # fmt: skip
        self._activation(prefix, rows * f)
        self.linear(f"{experts}.down_proj", "mlp", rows, h, f, f"{prefix}.inner",
                    weight=f"{experts}.down_proj", experts=e)  # fmt: skip
        if s.moe_bias:
            self.param(f"{prefix}.router.bias", (e,))
            for part, size in (("gate", f), ("up", f), ("down", h)):
                if part != "gate" or s.gated:
                    self.param(f"{experts}.{part}_bias", (e, size))
        self.pointwise(f"{prefix}.combine", "mlp", "copy", 2 * rows * h, t * h, t * h, 2 * rows * h)
        self.save(f"{prefix}.expert_out", rows * h, [f"{prefix}.combine.bwd"])

    def _activation(self, prefix: str, n: float) -> None:
        """silu(gate)·up, or one activation; saves its inputs (a plain ReLU its output, as the next linear does)."""
        inputs = 2 if self.spec.gated else 1
        self.pointwise(f"{prefix}.act", "mlp", "activation", inputs * n, n, (inputs + 1) * n, inputs * n)
        kept = "inner" if self.spec.activation == "relu" and not self.spec.gated else "up"
        self.save(f"{prefix}.{kept}", n, [f"{prefix}.act.bwd"])
        if self.spec.gated:
            self.save(f"{prefix}.gate", n, [f"{prefix}.act.bwd"])
            if self.spec.activation not in ("silu", "swigluoai"):  # two operators (see nn/model/mlp.py)
                self.save(f"{prefix}.acted", n, [f"{prefix}.act.bwd"])
        self.block.workspace = max(self.block.workspace, n * self.width)
        self.block.backward_workspace = max(self.block.backward_workspace, (inputs + 1) * n * self.width)
