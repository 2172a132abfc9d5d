"""A copied graph shares nothing that a technique changes."""

from __future__ import annotations

from dataclasses import fields

from ridgeline import experiments
from ridgeline.graph import Block, Graph, Param, training_graph


def graph() -> Graph:
    return training_graph(experiments.make("llama2-7b", "a100-80g-sxm", {"kind": "pretrain", "seq_len": 128}, []))


def test_every_field_is_copied():
    g = graph()
    b = g.blocks[1]
    for i, field in enumerate(f for f in fields(Block) if f.name not in ("params", "saved")):
        value = getattr(b, field.name)
        setattr(b, field.name, [*value] if isinstance(value, list) else f"{i}" if isinstance(value, str) else i + 2)
    p = b.params[0]
    for i, field in enumerate(fields(Param)):
        setattr(p, field.name, i)
    again = g.copy()
    assert again == g
    assert again is not g


def test_changes_stay_apart():
    g, other = graph(), graph()
    again = g.copy()
    again.blocks[1].params[0].shards = 8
    again.blocks[1].forward.pop()
    again.blocks[1].saved.clear()
    again.blocks[1].reduce.append(again.blocks[1].forward[0])
    again.update.append(again.blocks[1].forward[0])
    again.closing.append(lambda _: None)
    assert g == other


def test_a_cut_covers_every_layer_once():
    g = graph()
    g.blocks[1].repeat = 20
    rest = g.blocks[1].copy()
    rest.repeat = 12
    g.blocks.insert(2, rest)
    for parts in (1, 2, 4, 8, 16, 32):
        stages = g.cut(parts)
        layers = [sum(b.repeat for b in stage if b.name == "layers") for stage in stages]
        assert sum(layers) == 32
        assert max(layers) - min(layers) <= 1
        assert sum(b.repeat for stage in stages for b in stage if b.params is rest.params) == 12
        assert stages[0][0].name == "embed"
        assert stages[-1][-1].name == "head"
