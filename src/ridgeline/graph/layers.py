"""Forward operators of a transformer, module by module, with the backward operators and saved activations they imply.

The rules for what autograd saves are those of the torch model (:mod:`ridgeline.nn`): a matrix multiplication saves its
input, a normalization its input and its statistics, softmax its output, a gated activation its gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.graph.graph import Block, Direction, Op, Param, Role, Saved
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.model import ModelSpec

ROUTING, DISPATCH, COMBINE = 4, 4, 6
"""Number of small operators around a mixture's experts (:mod:`ridgeline.nn.model.moe`): probabilities, the best of them
and their sum; the order of rows by expert; rows put back, weighed and summed."""


def distinct_experts(experts: int, tokens: float, chosen: int) -> float:
    """Expected number of experts that ``tokens`` reach which choose ``chosen`` different ones each, when popularity is
    uneven.

    The probabilities of being chosen by a token are assumed to follow Beta(1, e/k - 1), of mean k/e, so that
    e·n / (e/k - 1 + n) of e experts are reached: all k by one token; a fifth fewer than under even routing, which
    reaches e · (1 - (1 - k/e)^n), by medium batches (as measured decoding times show).
    """
    return experts * tokens / (experts / chosen - 1 + tokens)


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
    layer: int = 0
    """The first of the layers that it stands for."""
    source: int = 0
    """Tokens of the encoder's input, in an encoder-decoder."""
    encodes: bool = True
    """Whether the encoder reads it; otherwise the decoder's layers have its keys and values."""

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
        chosen = self.spec.experts_per_token
        touched = distinct_experts(experts, m / chosen, chosen) if experts > 1 else 1.0
        traffic = (m * k + m * n + n * k * touched) * self.width

        def product(suffix: str, direction: Direction, shape: tuple[int, int, int], role: Role = "") -> Op:
            return Op(f"{name}{suffix}", module, "gemm", direction, flops, traffic, self.dtype, shape, weight,
                      experts=touched, calls=max(1.0, touched), role=role)  # fmt: skip

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
                  back_write: float, calls: float = 1) -> None:  # fmt: skip
        """An elementwise or reduction operator: elements read and written, forward and backward."""
        w = self.width
        self.block.forward.append(Op(name, module, kind, bytes=(read + write) * w, dtype=self.dtype, calls=calls))
        if self.training:
            moved = (back_read + back_write) * w
            self.block.backward.append(Op(f"{name}.bwd", module, kind, "backward", 0, moved, self.dtype, calls=calls))

    def norm(
        self, name: str, source: str, size: int, rows: int | None = None, module: str = "norm", weighted: bool = True
    ) -> None:
        """RMSNorm or LayerNorm over ``size``: saves its input and one (two) statistics per row."""
        rows = self.tokens if rows is None else rows
        if weighted:
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
        if s.is_latent:
            self.latent_attention(prefix, source)
            return
        h, q, kv, d = s.hidden_size, s.q_size, s.kv_size, s.head_dim
        kv_rows = self.batch * self.source if cross else t
        self.linear(f"{prefix}.q_proj", m, t, q, h, source, bias=s.qkv_bias)
        kv_source = "encoder_output" if cross else source
        self.linear(f"{prefix}.k_proj", m, kv_rows, kv, h, kv_source, bias=s.qkv_bias)
        self.linear(f"{prefix}.v_proj", m, kv_rows, kv, h, kv_source, bias=s.qkv_bias)
        if cross:
            self._crossed(prefix, d)
            self.linear(f"{prefix}.o_proj", m, t, h, q, f"{prefix}.context", bias=s.out_bias)
            return
        if s.has_qk_norm(self.layer):
            for part, width, heads in (("q", q, s.num_heads), ("k", kv, s.num_kv_heads)):
                size, rows = (width, t) if s.joint_qk_norm else (d, t * heads)
                self.norm(f"{prefix}.{part}_norm", f"{prefix}.{part}_raw", size, rows, m, s.qk_norm_weight)
        if s.attention_sinks:
            self.param(f"{prefix}.sinks", (s.num_heads,))
        if s.is_rotated_layer(self.layer):
            for part, n in (("q", t * q), ("k", t * kv)):
                self.pointwise(f"{prefix}.{part}_rope", m, "rope", n, n, n, n)
        self._core(prefix, d, d, s.num_kv_heads)
        self.linear(f"{prefix}.o_proj", m, t, h, q, f"{prefix}.context", bias=s.out_bias)

    def _crossed(self, prefix: str, d: int) -> None:
        """The core of attention to the encoder's output, which all layers keep one tensor of."""
        if not self.encodes:  # keys and values are cached
            stored = (f"{prefix}.k_proj", f"{prefix}.v_proj")
            self.block.forward = [o for o in self.block.forward if o.name not in stored]
        if (kept := self.block.saved.get("encoder_output")) is not None:
            self.block.saved["encoder_output"] = Saved(kept.bytes // self.spec.num_layers, kept.users)
        self._core(prefix, d, d, self.spec.num_kv_heads, self.source)

    def latent_attention(self, prefix: str, source: str) -> None:
        """Multi-head latent attention (arXiv:2405.04434, section 2.1), with keys and values expanded where all that is
        attended to is new, and with the projections that would do it absorbed otherwise (nn/model/latent.py)."""
        s, t, m = self.spec, self.tokens, "attention"
        assert s.kv_lora_rank is not None
        h, q, heads, rank, turned = s.hidden_size, s.q_size, s.num_heads, s.kv_lora_rank, s.rotated
        wide, value = s.cached_dim, s.context_size // heads
        own = s.head_dim - turned
        if s.q_lora_rank is None:
            self.linear(f"{prefix}.q_proj", m, t, q, h, source)
        else:
            self.linear(f"{prefix}.q_a_proj", m, t, s.q_lora_rank, h, source, bias=s.qkv_bias)
            self.norm(f"{prefix}.q_a_norm", f"{prefix}.q_latent", s.q_lora_rank, t, m)
            self.linear(f"{prefix}.q_b_proj", m, t, q, s.q_lora_rank, f"{prefix}.q_normed")
        self.pointwise(f"{prefix}.q_rope", m, "rope", t * heads * turned, t * heads * turned, t * heads * turned,
                       t * heads * turned)  # fmt: skip
        self.linear(f"{prefix}.kv_a_proj", m, t, wide, h, source, bias=s.qkv_bias)
        self.norm(f"{prefix}.kv_a_norm", f"{prefix}.kv_latent", rank, t, m)
        self.save(f"{prefix}.kv_latent", t * wide, [f"{prefix}.kv_a_norm.bwd"])  # with the key beside it
        self.pointwise(f"{prefix}.k_rope", m, "rope", t * turned, t * turned, t * turned, t * turned)
        if not self.training and self.q_len < self.kv_len:
            self._absorbed(prefix, own, value)
            return
        self.linear(f"{prefix}.kv_b_proj", m, t, heads * (own + value), rank, f"{prefix}.kv_normed")
        self.pointwise(f"{prefix}.join", m, "copy", 2 * t * q, 2 * t * q, 2 * t * q, t * (2 * q + heads * value))
        self._core(prefix, s.head_dim, value, heads)
        self.linear(f"{prefix}.o_proj", m, t, h, heads * value, f"{prefix}.context", bias=s.out_bias)

    def _absorbed(self, prefix: str, own: int, value: int) -> None:
        """Attention to cached latents: one key head, whose values are its keys."""
        s, t, m = self.spec, self.tokens, "attention"
        assert s.kv_lora_rank is not None
        heads, rank, weight = s.num_heads, s.kv_lora_rank, f"{prefix}.kv_b_proj.weight"
        self.param(weight, (heads * (own + value), rank))

        def product(name: str, n: int, k: int) -> None:
            moved = heads * (t * (n + k) + n * k) * self.width
            self.block.forward.append(Op(f"{prefix}.{name}", m, "bmm", flops=2.0 * t * heads * n * k, bytes=moved,
                                         dtype=self.dtype, shape=(heads, t, n, k), param=weight))  # fmt: skip

        product("absorb", rank, own)
        self.pointwise(f"{prefix}.join", m, "copy", t * heads * s.cached_dim, t * heads * s.cached_dim, 0, 0)
        self._core(prefix, s.cached_dim, s.cached_dim, 1)
        product("expand", value, rank)
        self.linear(f"{prefix}.o_proj", m, t, s.hidden_size, heads * value, f"{prefix}.context", bias=s.out_bias)

    def _core(self, prefix: str, d: int, value: int, kv_heads: int, source: int = 0) -> None:
        """Scores, mask, softmax and values of heads of width ``d``, whose values have width ``value`` (unfused).
        ``source``: keys of another sequence, all of which are seen."""
        s, m = self.spec, "attention"
        b, hq, sq, sk = self.batch, s.num_heads, self.q_len, source or self.kv_len
        scores = float(b * hq * sq * sk)
        flops, value_flops = 2.0 * scores * d, 2.0 * scores * value
        w = self.width
        qk, pv = ((b * hq * sq * width + b * kv_heads * sk * width + scores) * w for width in (d, value))
        shape = (b * hq, sq, sk, d)
        fwd, bwd = self.block.forward, self.block.backward
        fwd.append(Op(f"{prefix}.scores", m, "bmm", flops=flops, bytes=qk, dtype=self.dtype, shape=shape))
        if s.attention_soft_cap is not None:
            self.pointwise(f"{prefix}.soft_cap", m, "activation", scores, scores, 2 * scores, scores)
            self.save(f"{prefix}.capped", scores, [f"{prefix}.soft_cap.bwd"])
        added = 2 if s.position == "alibi" else 1  # its bias is another addition
        if not source:
            fwd.append(Op(f"{prefix}.mask", m, "mask", bytes=2 * added * scores * w, dtype=self.dtype))
        drop = (2 * w + 1) * scores if s.dropout else 0.0  # probabilities read and written again, with their mask
        fwd.append(Op(f"{prefix}.softmax", m, "softmax", bytes=2 * scores * w + drop, dtype=self.dtype))
        fwd.append(Op(f"{prefix}.values", m, "bmm", flops=value_flops, bytes=pv, dtype=self.dtype,
                      shape=(b * hq, sq, value, sk)))  # fmt: skip
        if self.training:

            def product(name: str, shape: tuple[int, ...], of_values: bool = False) -> Op:
                work, moved = (value_flops, pv) if of_values else (flops, qk)
                return Op(f"{prefix}.{name}", m, "bmm", "backward", work, moved, self.dtype, shape)

            bwd.append(product("values.dprobs", (b * hq, sq, sk, value), True))
            bwd.append(product("values.dv", (b * hq, sk, value, sq), True))
            bwd.append(Op(f"{prefix}.softmax.bwd", m, "softmax", "backward", 0, 3 * scores * w + drop, self.dtype))
            if s.position == "relative" and not source:  # the sum over the batch is their gradient
                bwd.append(Op(f"{prefix}.relative.dw", m, "reduce", "backward", 0, scores * w, self.dtype,
                              role="bias_gradient"))  # fmt: skip
            bwd.append(product("scores.dq", (b * hq, sq, d, sk)))
            bwd.append(product("scores.dk", (b * hq, sk, d, sq)))
            self.save(f"{prefix}.q", b * sq * hq * d, [f"{prefix}.scores.dk"])
            self.save(f"{prefix}.k", b * sk * kv_heads * d, [f"{prefix}.scores.dq"])
            self.save(f"{prefix}.v", b * sk * kv_heads * value, [f"{prefix}.values.dprobs"])
            self.save(f"{prefix}.probs", scores, [f"{prefix}.values.dv", f"{prefix}.softmax.bwd"])
            if s.dropout:  # its mask, and the probabilities that remain (arXiv:2205.05198, section 4.1)
                self.save(f"{prefix}.probs.mask", scores, [f"{prefix}.softmax.bwd"], 1.0)
                self.save(f"{prefix}.probs.dropped", scores, [f"{prefix}.values.dv"])
        self.block.workspace = max(self.block.workspace, 2 * scores * w)
        self.block.backward_workspace = max(self.block.backward_workspace, 2 * scores * w)

    def mlp(self, prefix: str, source: str, width: int = 0) -> None:
        """Dense MLP, gated or not, of inner ``width`` (0: the model's)."""
        s, t = self.spec, self.tokens
        h, f = s.hidden_size, width or s.dense_size
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
        if s.router_score_bias:
            self.param(f"{prefix}.score_bias", (e,))
            self.block.params[-1].trainable = False
        reached = distinct_experts(e, t, k)
        self.pointwise(f"{prefix}.routing", "mlp", "softmax", t * e, t * e, 2 * t * e, t * e, ROUTING)
        self.save(f"{prefix}.routing", t * e + 4 * t * k, [f"{prefix}.routing.bwd"], 4.0)
        rows = t * k
        self.pointwise(f"{prefix}.dispatch", "mlp", "copy", rows * h, rows * h, rows * h, rows * h, DISPATCH)
        experts = f"{prefix}.experts"
        if s.gated:
            self.linear(f"{experts}.gate_proj", "mlp", rows, f, h, f"{prefix}.dispatched",
                        weight=f"{experts}.gate_proj", experts=e)  # fmt: skip
        self.linear(f"{experts}.up_proj", "mlp", rows, f, h, f"{prefix}.dispatched",
                    weight=f"{experts}.up_proj", experts=e)  # fmt: skip
        self._activation(prefix, rows * f, reached)
        self.linear(f"{experts}.down_proj", "mlp", rows, h, f, f"{prefix}.inner",
                    weight=f"{experts}.down_proj", experts=e)  # fmt: skip
        if s.moe_bias:
            self.param(f"{prefix}.router.bias", (e,))
            for part, size in (("gate", f), ("up", f), ("down", h)):
                if part != "gate" or s.gated:
                    self.param(f"{experts}.{part}_bias", (e, size))
        self.pointwise(f"{prefix}.combine", "mlp", "copy", 2 * rows * h, t * h, t * h, 2 * rows * h, COMBINE)
        weighed = "routed" if s.router_on_input else "expert_out"  # what the weights multiply
        self.save(f"{prefix}.{weighed}", rows * h, [f"{prefix}.combine.bwd"])
        if s.shared_intermediate_size:
            self.mlp(f"{prefix}.shared", source, s.shared_intermediate_size)
            self.pointwise(f"{prefix}.shared.add", "mlp", "residual", 2 * t * h, t * h, 0, 0)

    def _activation(self, prefix: str, n: float, calls: float = 1) -> None:
        """silu(gate)·up, or one activation; saves its inputs (a plain ReLU its output, as the next linear does)."""
        inputs = 2 if self.spec.gated else 1
        self.pointwise(f"{prefix}.act", "mlp", "activation", inputs * n, n, (inputs + 1) * n, inputs * n, calls)
        kept = "inner" if self.spec.activation == "relu" and not self.spec.gated else "up"
        self.save(f"{prefix}.{kept}", n, [f"{prefix}.act.bwd"])
        if self.spec.gated:
            self.save(f"{prefix}.gate", n, [f"{prefix}.act.bwd"])
            if self.spec.activation not in ("silu", "swigluoai"):  # two operators (see nn/model/mlp.py)
                self.save(f"{prefix}.acted", n, [f"{prefix}.act.bwd"])
        self.block.workspace = max(self.block.workspace, n * self.width)
        self.block.backward_workspace = max(self.block.backward_workspace, (inputs + 1) * n * self.width)
