"""The torch model: one transformer that runs every family a ModelSpec can describe.

Shapes: B batch, S sequence, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.checkpoint.hf_names import require_twin
from ridgeline.nn.model.attention import (
    Attention,
    AttentionBackend,
    CacheOf,
    LayerCache,
    SelfAttention,
    find_backend,
    plain_cache,
)
from ridgeline.nn.model.cross import CrossAttention, Source, padding_mask, relative_bias, with_bias
from ridgeline.nn.model.flash_blocks import Sequences, fits_varlen, has_varlen
from ridgeline.nn.model.latent import LatentAttention
from ridgeline.nn.model.mask import Mask, make_mask
from ridgeline.nn.model.mlp import ACTIVATIONS, MLP
from ridgeline.nn.model.moe import MoE
from ridgeline.nn.model.norm import NoNorm, compute_dtype, make_norm
from ridgeline.nn.model.rotary import Rope, Rotary
from ridgeline.nn.model.spans import by_spans
from ridgeline.nn.parallel.collectives import local
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec


def _table(rows: int, width: int) -> nn.Embedding:
    """An uninitialized embedding: PyTorch's own initialization, on the meta device, spends most of a second on
    imports."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class InputEmbedding(nn.Module):
    """Token, position and token-type embeddings, and the norm over their sum, as far as the family has them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        h = spec.hidden_size
        self.offset = spec.position_offset
        self.multiplier, self.rounded = spec.embedding_multiplier or 1.0, spec.embedding_multiplier_rounded
        self.tokens = _table(spec.vocab_size, h)
        learned = spec.position == "learned"
        self.positions = _table(spec.max_positions + spec.position_offset, h) if learned else None
        self.token_types = _table(spec.token_types, h) if spec.token_types else None
        relative = spec.position == "relative"
        self.encoder_relative = _table(spec.relative_buckets, spec.num_heads) if relative else None
        self.decoder_relative = _table(spec.relative_buckets, spec.num_heads) if relative else None
        self.norm = make_norm(spec, h) if spec.embedding_norm else None
        self.wide = not spec.post_norm
        """Whether the residual stream keeps its dtype under autocast: no norm follows each addition to it."""
        self.part: Callable[[Tensor], Tensor] = lambda rows: rows
        """Selects this rank's part of rows [..., S, H], where the sequence is divided after the lookup."""

    def forward(self, ids: Tensor, positions: Tensor | None, token_types: Tensor | None, start: int = 0) -> Tensor:
        """``ids`` [B, S] → [B, S, H]; ``positions`` default to ``start``, ``start`` + 1, …, ``token_types`` to 0."""
        x: Tensor = self.tokens(ids)
        if self.multiplier != 1:
            x = x * (
                float(torch.tensor(self.multiplier, dtype=x.dtype, device="cpu")) if self.rounded else self.multiplier
            )
        if self.positions is not None:
            if positions is None:
                first = start + self.offset
                x = x + self.part(local(self.positions.weight)[first : first + ids.shape[1]])
            else:
                x = x + self.part(F.embedding(positions + self.offset, local(self.positions.weight)))
        if self.token_types is not None:
            kinds = local(self.token_types.weight)
            x = x + (kinds[0] if token_types is None else self.part(F.embedding(token_types, kinds)))
        if self.norm is not None and self.wide and not x.is_meta:
            with torch.autocast(x.device.type, enabled=False):
                return self.norm(x)  # type: ignore[no-any-return]
        return x if self.norm is None else self.norm(x)


AddNorm = Callable[[Tensor, Tensor, nn.Module], tuple[Tensor, Tensor]]


def add_then_norm(x: Tensor, update: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The sum of the residual stream and an ``update`` of it, and the norm of that sum."""
    x = x + update
    return x, norm(x)


class TransformerBlock(nn.Module):
    """One layer: attention and feed-forward, each with its residual.

    Normalized is what each reads, what each adds (``output_norms``), or the sum (BERT's ``post_norm``).
    """

    def __init__(self, spec: ModelSpec, index: int, encodes: bool = False) -> None:
        """``encodes``: a layer of the encoder in a model that has both."""
        super().__init__()
        h = spec.hidden_size
        crosses = spec.is_encoder_decoder and not encodes
        self.windowed = spec.is_windowed_layer(index)
        self.post_norm, self.parallel, self.shared_norm = spec.post_norm, spec.parallel_residual, spec.shared_norm
        self.multiplier = spec.residual_multiplier or 1.0
        reads = spec.input_norms or spec.post_norm
        self.attention_norm = make_norm(spec, h) if reads else NoNorm()
        self.attention = LatentAttention(spec) if spec.is_latent else Attention(spec, index)
        self.attention_out_norm = make_norm(spec, h) if spec.output_norms else None
        self.cross_norm = make_norm(spec, h) if crosses else None
        self.cross_attention = CrossAttention(spec) if crosses else None
        self.mlp_norm = make_norm(spec, h) if reads and not spec.shared_norm else NoNorm()
        self.mlp_out_norm = make_norm(spec, h) if spec.output_norms else None
        self.mlp = MoE(spec) if spec.is_moe_layer(index) else MLP(spec, spec.dense_size)
        self.add_norm: AddNorm = add_then_norm
        """A residual addition and the norm that reads it; a technique may replace it by a fused kernel."""

    def forward(self, x: Tensor, mask: Mask, rope: Rope | None = None, cache: LayerCache | None = None,
                source: Source | None = None) -> Tensor:  # fmt: skip
        """``x`` [B, S, H] → [B, S, H]."""
        x, update = self.advance(x, None, mask, rope, cache, source)
        return x if update is None else x + update

    def advance(self, x: Tensor, update: Tensor | None, mask: Mask, rope: Rope | None, cache: LayerCache | None,
                source: Source | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The same without the last addition, which the next norm can do as it reads the sum: the residual stream, and
        what is still to be added to it. ``update``: what the layer before has left."""
        if self.post_norm:
            x = x if update is None else x + update
            x = self.add_norm(x, self.attention_update(self.attention(x, mask, rope, cache)), self.attention_norm)[1]
            return self.add_norm(x, self.mlp_update(self.mlp(x)), self.mlp_norm)[1], None
        if update is None:
            read = self.attention_norm(x)
        else:
            x, read = self.add_norm(x, update, self.attention_norm)
        update = self.attention_update(self.attention(read, mask, rope, cache))
        if self.parallel:
            normed = read if self.shared_norm else self.mlp_norm(x)
            x = x + update
        else:
            if self.cross_attention is not None and self.cross_norm is not None:
                assert source is not None
                x, read = self.add_norm(x, update, self.cross_norm)
                update = self.cross_attention(read, source, cache)
            x, normed = self.add_norm(x, update, self.mlp_norm)
        return x, self.mlp_update(self.mlp(normed))

    @property
    def in_two(self) -> bool:
        """Whether the layer is :meth:`attend` and then :meth:`feed`, which need nothing else of each other."""
        return not self.parallel and self.cross_attention is None

    def attend(self, x: Tensor, mask: Mask, rope: Rope | None = None, cache: LayerCache | None = None) -> Tensor:
        """Attention with its residual: ``x`` [B, S, H] → [B, S, H]."""
        if self.post_norm:
            return self.add_norm(x, self.attention_update(self.attention(x, mask, rope, cache)), self.attention_norm)[1]
        return x + self.attention_update(self.attention(self.attention_norm(x), mask, rope, cache))

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward part with its residual: ``x`` [B, S, H] → [B, S, H]."""
        if self.post_norm:
            return self.add_norm(x, self.mlp_update(self.mlp(x)), self.mlp_norm)[1]
        return x + self.mlp_update(self.mlp(self.mlp_norm(x)))

    def attention_update(self, out: Tensor) -> Tensor:
        """What the attention's output adds to the residual stream."""
        return self._update(out, self.attention_out_norm)

    def mlp_update(self, out: Tensor) -> Tensor:
        """What the feed-forward layer's output adds to the residual stream."""
        return self._update(out, self.mlp_out_norm)

    def _update(self, out: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is not None:
            out = norm(out)
        return out if self.multiplier == 1 else out * self.multiplier


class LMHead(nn.Module):
    """Hidden states → logits: [..., H] → [..., V]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.scaling, self.soft_cap = spec.logits_scaling or 1.0, spec.logits_soft_cap
        self.out = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ``x`` [..., H]."""
        return self.scaled(self.out(x))

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits from the results of the last product."""
        logits = logits if self.scaling == 1 else logits / self.scaling
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap


class MLMHead(nn.Module):
    """BERT's head: dense, activation, norm, then logits: [..., H] → [..., V]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.dense = nn.Linear(spec.hidden_size, spec.hidden_size)
        self.norm = make_norm(spec, spec.hidden_size)
        self.out = nn.Linear(spec.hidden_size, spec.vocab_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ``x`` [..., H]."""
        logits: Tensor = self.out(self.norm(self.activation(self.dense(x))))
        return logits


class ClassifyHead(nn.Module):
    """BERT's pooler and classifier: dense, tanh, then logits: [..., H] → [..., labels]. A text is classified by its
    first token."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dense = nn.Linear(spec.hidden_size, spec.hidden_size)
        self.out = nn.Linear(spec.hidden_size, spec.num_labels)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ``x`` [..., H]."""
        logits: Tensor = self.out(torch.tanh(self.dense(x)))
        return logits


class ProjectHead(nn.Module):
    """ColBERT's projection of each token: [..., H] → [..., projection_size]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.out = nn.Linear(spec.hidden_size, spec.projection_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Vectors of ``x`` [..., H]."""
        vectors: Tensor = self.out(x)
        return vectors


Head = LMHead | MLMHead | ClassifyHead | ProjectHead
HEADS: dict[str, type[Head]] = {"lm": LMHead, "mlm": MLMHead, "classify": ClassifyHead, "project": ProjectHead}


def _nothing_left(name: str) -> None:
    """The block is complete."""


class Transformer(nn.Module):
    """The model that ``spec`` describes; parameters are named and shaped as :meth:`ModelSpec.parameters` lists them.

    The constructor leaves weights uninitialized: use :func:`ridgeline.nn.build`, ``materialize``, ``init_weights`` or
    ``load_checkpoint``. ``embed``, ``norm`` and ``head`` may be set to None and layers deleted, which is how a pipeline
    stage is cut out. Raises :class:`UserError` for a family that exists as a spec only.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        require_twin(spec)
        if spec.dropout or not spec.norm_bias:
            raise UserError(
                f"model {spec.name!r} has dropout or a norm without bias: it can be predicted, not run",
                "run a model with dropout = 0 and norm_bias = true",
            )
        self.spec = spec
        self.embed: InputEmbedding | None = InputEmbedding(spec)
        encoder = {str(i): TransformerBlock(spec, i, encodes=True) for i in range(spec.encoder_layers)}
        self.encoder = nn.ModuleDict(encoder)
        self.encoder_norm = make_norm(spec, spec.hidden_size) if encoder else None
        self.layers = nn.ModuleDict({str(i): TransformerBlock(spec, i) for i in range(spec.num_layers)})
        self.norm: nn.Module | None = make_norm(spec, spec.hidden_size) if spec.final_norm else None
        self.head: Head | None = HEADS[spec.head](spec)
        self.rotary = Rotary(spec) if spec.position == "rope" else None
        self.local_rotary = Rotary(spec, windowed=True) if self.rotary and spec.local_rope_theta is not None else None
        """The rotary embedding of layers with a sliding window, where it is another one."""
        self.sequence_parts = 1
        """Number of ranks over which the incoming hidden states (in a model without ``embed``) divide the sequence."""
        self.splits_documents = True
        """Whether attention may be divided by documents, whose lengths differ in every batch."""
        self.cache_of: CacheOf = plain_cache
        """Creates the cache of a layer's keys and values; a technique may replace it by a smaller format."""
        self.complete: Callable[[str], None] = _nothing_left
        """Makes the quantized layers of the block of this name, where loading a checkpoint left that for later."""
        self.mapped: dict[str, int] = {}
        """Names and bytes of parameters that were loaded as mapped files."""
        self.tie()

    @property
    def mapped_bytes(self) -> int:
        """Bytes of weights in mapped files, which the system counts as memory that is free; not of those that codes
        have replaced since."""
        held = dict(self.named_parameters())
        return sum(size for name, size in self.mapped.items() if name in held)

    def tie(self) -> None:
        """Make a tied head share the embedding's parameter. Needed again after anything that replaces parameters."""
        if not self.spec.tie_embeddings or self.head is None or self.embed is None:
            return
        if isinstance(self.head.out, nn.Linear):  # not where it holds codes
            self.head.out.weight = self.embed.tokens.weight

    def rope(
        self, windowed: bool, positions: Tensor | None, start: int, length: int, device: torch.device,
        dtype: torch.dtype,
    ) -> Rope | None:  # fmt: skip
        """Rotary tables of the layers with a sliding window, or of the others; arguments as :meth:`Rotary.tables`."""
        if self.spec.nope_layers and not windowed:
            return None
        rotary = self.local_rotary if windowed and self.local_rotary is not None else self.rotary
        return None if rotary is None else rotary.tables(positions, start, length, device, dtype)

    def set_attention(self, backend: str | AttentionBackend) -> None:
        """Compute attention with ``backend``: "naive", "flash", or one of your own."""
        found = find_backend(backend) if isinstance(backend, str) else backend
        for module in self.modules():
            if isinstance(module, SelfAttention):
                module.backend = found

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """All layers by the names of their modules, the encoder's first."""
        stacks = (("encoder", self.encoder), ("layers", self.layers))
        return {f"{stack}.{name}": block for stack, blocks in stacks for name, block in blocks.items()}

    @property
    def backend(self) -> AttentionBackend:
        """The attention backend."""
        return next(m.backend for m in self.layers.modules() if isinstance(m, SelfAttention))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        cache: dict[str, LayerCache] | None = None,
        return_hidden: bool = False,
        documents: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        sequences: Sequences | None = None,
    ) -> Tensor:
        """Token ids [B, S] (or, in a model without ``embed``, hidden states [B, S, H]) → logits [B, S, V].

        ``positions`` [S] or [B, S] default to 0, 1, … (with a cache: to those behind it). ``attention_mask`` [B, S]
        (with a cache: [B, everything so far]) is True for real tokens; None means all are. ``cache`` maps layer names
        to their :class:`LayerCache`. ``documents`` [B, S] numbers the packed documents of a row, each a run of equal
        numbers, which do not see each other and whose ``positions`` start anew (all of the sequence's, where that is
        divided over ranks); ``sequences`` is where these end, which a GPU's kernel must be told to attend within them.
        ``source`` [B, T] is what an encoder reads, and ``source_mask`` [B, T] True for its real tokens; a cache that
        has read it takes its place.
        ``return_hidden`` gives what the head would read, [B, S, H], for :func:`ridgeline.nn.token_loss`.
        """
        length, device = input_ids.shape[1], input_ids.device
        if self.embed is None:
            length *= self.sequence_parts
        start = next(iter(cache.values())).length if cache else 0
        x = input_ids if self.embed is None else self.embed(input_ids, positions, token_types, start)
        dtype = compute_dtype(x)
        padding = None if attention_mask is None else attention_mask.bool()
        own = documents if self.backend.separates else None
        separate = None if self.backend.separates else documents
        wants = self.backend.wants_bias or self.spec.position == "relative"
        whole = cache is None and padding is None and not wants and self.backend.splits
        runs = self._sequences(x, length, documents, sequences) if whole else None
        rows = x.shape[0] if whole and by_spans(self.spec, x) else 0
        kinds: dict[bool, tuple[Mask, Rope | None]] = {}
        encoded = self._source(source, source_mask, dtype) if self.encoder else None
        for name, block in self.layers.items():
            if (kind := bool(block.windowed)) not in kinds:
                mask = make_mask(self.spec, kind, padding, start, length, wants, device, dtype, separate, positions,
                                 runs, rows)  # fmt: skip
                if self.embed is not None and self.embed.decoder_relative is not None:
                    bias = relative_bias(self.embed.decoder_relative, self.spec, False, start, length, start + length,
                                         device)  # fmt: skip
                    mask = with_bias(mask, bias.to(dtype))
                rope = self.rope(kind, positions, start, length, device, dtype)
                kept: dict[str, Tensor] | None = {} if self.spec.score_changes else None
                kinds[kind] = mask._replace(documents=own, kept=kept), rope
            given = (*kinds[kind], None if cache is None else cache[name])
            x = block(x, *given) if encoded is None else block(x, *given, encoded)
        if self.norm is not None:
            x = self.norm(x)
        return x if return_hidden or self.head is None else self.head(x)

    def _sequences(self, x: Tensor, length: int, documents: Tensor | None, given: Sequences | None) -> Sequences | None:
        """What attention of rows without a cache or padding can be divided into; None: a mask is needed or nothing
        is."""
        spec = self.spec
        if documents is not None and not self.splits_documents:
            return None
        if has_varlen(x.device):
            if spec.attention_soft_cap is not None or spec.position == "alibi":
                return None
            if not fits_varlen(compute_dtype(x), spec.head_dim):
                return None
            if documents is not None:
                return given
            windowed = spec.sliding_window is not None and spec.sliding_window < length
            return Sequences.of_rows(x.shape[0], length, x.device) if windowed else None
        if documents is None or x.device.type != "cpu" or not spec.causal or spec.score_changes:
            return None
        return Sequences.of_documents(documents)

    def _source(self, ids: Tensor | None, padding: Tensor | None, dtype: torch.dtype) -> Source:
        """What the encoder makes of ``ids`` [B, T]."""
        mask = padding_mask(padding, dtype)
        if ids is None:
            return Source(None, mask)
        assert self.embed is not None
        assert self.embed.encoder_relative is not None
        assert self.encoder_norm is not None
        length = ids.shape[1]
        bias = relative_bias(self.embed.encoder_relative, self.spec, True, 0, length, length, ids.device)
        own = with_bias(mask, bias.to(dtype))
        x = self.embed(ids, None, None)
        for block in self.encoder.values():
            x = block(x, own)
        return Source(self.encoder_norm(x), mask)
