"""Structures over tokens."""

import json
import random
import re

import pytest

pytest.importorskip("llguidance")

from ridgeline.data.batches import train_tokenizer
from ridgeline.serve.block_manager import Blocks
from ridgeline.serve.detokenize import ServeJob, Vocabulary
from ridgeline.serve.grammar import MAX_DEPTH, Grammars, Matcher
from ridgeline.serve.outputs import Outputs
from ridgeline.serve.request import EngineRequest, Invalid, Sampling
from ridgeline.serve.scheduler import Scheduler
from ridgeline.serve.sequence import Sequence, SequenceGroup
from ridgeline.spec.scheduling import Limits

WORDS = Vocabulary(train_tokenizer(['{"name": "ab", "count": 12}'] * 5, 290), 300)  # ten ids without a token
GRAMMARS = Grammars(WORDS, frozenset([0]))
SCHEMA = {
    "type": "object", "required": ["name", "count"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 5}, "count": {"type": "integer", "minimum": 0}},
}  # fmt: skip


def walk(machine, seed, most=200):
    """Random allowed tokens to the end."""
    rng, tokens = random.Random(seed), []
    for _ in range(most):
        token = int(rng.choice(list(machine.allowed())))
        machine.accept(token)
        if token == 0:
            return WORDS.decode(tokens)
        tokens.append(token)
    return None


def test_any_allowed_walk_is_json_of_the_schema():
    texts = [walk(GRAMMARS.compile("json", SCHEMA, "x"), seed) for seed in range(40)]
    whole = [t for t in texts if t is not None]
    assert len(whole) > 20
    assert all(set(json.loads(t)) == {"name", "count"} for t in whole)
    assert len(set(whole)) > 10


def test_blanks_between_parts_are_bounded():
    machine = GRAMMARS.compile("json", {"type": "object"}, "x")
    blank = next(i for i, b in enumerate(WORDS.bytes) if b == b" ")
    machine.accept(next(i for i, b in enumerate(WORDS.bytes) if b == b"{"))
    steps = 0
    while blank in machine.allowed():
        machine.accept(blank)
        steps += 1
    assert 0 < steps < 40


def test_forks_go_their_own_ways():
    one = GRAMMARS.compile("choice", ["yes", "no"], "x")
    two = one.fork()
    first = {WORDS.bytes[i][:1]: int(i) for i in one.allowed()}
    one.accept(first[b"y"])
    two.accept(first[b"n"])
    assert {WORDS.bytes[i] for i in one.allowed()} == {b"e"}
    assert {WORDS.bytes[i] for i in two.allowed()} == {b"o"}


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("regex", "(", "regex"),
        ("json", {"type": "nothing"}, "type"),
        ("json", {"$ref": "https://example.com/x"}, "x"),
        ("grammar", "start: other", "other"),
        ("grammar", "start: start", "nothing can match"),
        ("json", {"$ref": "#"}, "nothing can match"),
        ("regex", "a" * 70_000, "characters"),
    ],
)
def test_what_cannot_be_compiled_is_told(kind, source, said):
    with pytest.raises(Invalid, match=said) as e:
        GRAMMARS.compile(kind, source, "response_format")
    assert e.value.param == "response_format"


def test_too_deep_a_schema_is_refused():
    schema: dict = {}
    for _ in range(MAX_DEPTH + 1):
        schema = {"items": schema}
    with pytest.raises(Invalid, match="deep"):
        GRAMMARS.compile("json", schema, "x")


def test_a_matcher_that_gives_up_ends_the_output_as_an_error():
    machine = GRAMMARS.compile("regex", "a+", "x")
    child = machine.fork()
    child.accept(next(i for i, b in enumerate(WORDS.bytes) if b == b"z"))
    assert list(child.allowed()) == [0]
    request = EngineRequest("r", [1], Sampling(grammar=machine))
    outputs = Outputs(Scheduler(Blocks(4, 4), Limits(), 16))
    outputs.emit(Sequence(SequenceGroup(request, 0), 0, [1, 0], grammar=child, finish="stop"))
    delta = ServeJob(request, WORDS).read(*outputs.take_events())
    assert delta.finish == "error"
    assert "structure" in delta.error
    assert isinstance(GRAMMARS.compile("regex", "a+", "x"), Matcher)
    assert not GRAMMARS.compile("regex", "a+", "x").failures  # others that ask the same are well


def test_a_grammar_may_be_in_gbnf():
    gbnf = 'root ::= "a" number{2} end\nnumber ::= [0-7] "-"\nend ::= "x" | "yy" # either'
    lark = 'start: "a" NUMBER{2} END\nNUMBER: /[0-7]/ "-"\nEND: "x" | "yy"'
    for source in (gbnf, lark):
        texts = {walk(GRAMMARS.compile("grammar", source, "x"), seed) for seed in range(20)}
        assert len(texts) > 5
        assert all(re.fullmatch("a([0-7]-){2}(x|yy)", text) for text in texts)
    with pytest.raises(Invalid, match="cannot be read"):
        GRAMMARS.compile("grammar", "root ::= select invalid\n\nselect ::=", "x")
