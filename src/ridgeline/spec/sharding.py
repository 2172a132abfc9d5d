"""How each operator of a transformer is divided over the ranks of one mesh axis: Alpa's intra-operator plan
(arXiv:2201.12023, section 4) for the operators of a transformer layer.

The residual stream [B, S, H] that the operators read and add to is *whole* on every rank, or *in parts*: each rank has
B / t of the micro-batch's sequences. With t ranks a part of the model has four strategies:

=========  =====================  ========  ===================================================================
reduce     weights divided        whole     an all-reduce after it, one before it in backward (arXiv:1909.08053)
scatter    weights divided        in parts  an all-gather before it, a reduce-scatter after it
batch      weights on every rank  in parts  none; the gradients of its weights are summed once a step
whole      weights on every rank  whole     none; every rank computes the same
=========  =====================  ========  ===================================================================

Between operators that keep the stream differently it is gathered, or cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, cast, get_args

Strategy = Literal["reduce", "scatter", "batch", "whole"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
DIVIDED: frozenset[Strategy] = frozenset({"reduce", "scatter"})
"""Strategies that divide weights."""
IN_PARTS: frozenset[Strategy] = frozenset({"scatter", "batch"})
"""Strategies with the residual stream in parts."""
_ENTRY = re.compile(r"(embed|head|attention|mlp)(?:\.(\d+)(?:-(\d+))?)?=(\w+)")


@dataclass(frozen=True)
class Sharding:
    """One strategy for every part of the model."""

    embed: Strategy
    attention: tuple[Strategy, ...]
    """Of every layer."""
    mlp: tuple[Strategy, ...]
    head: Strategy
    """Final norm, head and loss."""

    @classmethod
    def parse(cls, entries: Iterable[str], layers: int) -> Sharding:
        """Read ``PART=STRATEGY``, for layers also ``PART.LAYER=…`` and ``PART.FIRST-LAST=…``; what is not named has
        ``reduce``. Raises :class:`ValueError` with what is wrong."""
        ends: dict[str, Strategy] = {"embed": "reduce", "head": "reduce"}
        inner: dict[str, list[Strategy]] = {part: ["reduce"] * layers for part in ("attention", "mlp")}
        for entry in entries:
            match = _ENTRY.fullmatch(entry)
            if not match or match[4] not in STRATEGIES:
                raise ValueError(f"{entry!r} is not PART=STRATEGY, like attention.0-3=batch, with a strategy of"
                                 f" {', '.join(STRATEGIES)}")  # fmt: skip
            part, first, last, name = match.groups()
            strategy = cast(Strategy, name)
            if part in ends:
                if first:
                    raise ValueError(f"{entry!r}: there is one {part}, not one for every layer")
                ends[part] = strategy
                continue
            start = int(first or 0)
            end = layers - 1 if first is None else int(last or first)
            if not start <= end < layers:
                raise ValueError(f"{entry!r}: the model has layers 0-{layers - 1}")
            inner[part][start : end + 1] = [strategy] * (end + 1 - start)
        return cls(ends["embed"], tuple(inner["attention"]), tuple(inner["mlp"]), ends["head"])

    @classmethod
    def uniform(cls, strategy: Strategy, layers: int) -> Sharding:
        """The same strategy for all parts."""
        return cls(strategy, (strategy,) * layers, (strategy,) * layers, strategy)

    def entries(self) -> tuple[str, ...]:
        """The shortest entries that :meth:`parse` reads back."""
        out = [f"{part}={s}" for part, s in (("embed", self.embed), ("head", self.head)) if s != "reduce"]
        for part, each in (("attention", self.attention), ("mlp", self.mlp)):
            if len(set(each)) == 1:
                out += [f"{part}={each[0]}"] if each[0] != "reduce" else []
                continue
            for strategy, run in groupby(enumerate(each), key=lambda x: x[1]):
                found = [i for i, _ in run]
                span = f"{found[0]}-{found[-1]}" if len(found) > 1 else str(found[0])
                out += [f"{part}.{span}={strategy}"] if strategy != "reduce" else []
        return tuple(out)

    def of_layer(self, index: int) -> tuple[Strategy, Strategy]:
        """The strategies of a layer's attention and MLP."""
        return self.attention[index], self.mlp[index]

    def leaves_in_parts(self, index: int) -> bool:
        """Whether the stream is in parts behind layer ``index``; behind the embedding: -1."""
        return (self.embed if index < 0 else self.mlp[index]) in IN_PARTS

    @property
    def all_in_parts(self) -> bool:
        """Whether the stream is in parts everywhere."""
        return all(s in IN_PARTS for s in self.each)

    @property
    def any_in_parts(self) -> bool:
        """Whether the stream is in parts somewhere."""
        return any(s in IN_PARTS for s in self.each)

    @property
    def each(self) -> Sequence[Strategy]:
        """The strategies of all parts."""
        return (self.embed, *self.attention, *self.mlp, self.head)

    def torn(self) -> int | None:
        """The first layer whose attention and MLP would need the stream in different forms; None: there is none."""
        pairs = zip(self.attention, self.mlp, strict=True)
        return next((i for i, (a, m) in enumerate(pairs) if (a in IN_PARTS) != (m in IN_PARTS)), None)
