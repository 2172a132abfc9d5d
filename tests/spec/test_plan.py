"""Plans as text."""

import pytest

from ridgeline.spec.errors import UserError, nearest, unknown
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Call, Plan, scalar
from ridgeline.techniques.matrix import pair_experiment
from ridgeline.techniques.registry import normalize, registry


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("zero", "zero", {}),
        ("zero:stage=3", "zero", {"stage": 3}),
        (" zero : stage = 3 , x=a ".replace(" :", ":"), "zero", {"stage": 3, "x": "a"}),
        ("lora:rank=4,alpha=1.5", "lora", {"rank": 4, "alpha": 1.5}),
        ("lora:targets=q_proj+v_proj", "lora", {"targets": ["q_proj", "v_proj"]}),
        ("x:a=true,b=False,c=4k,d=1e-3,e=k", "x", {"a": True, "b": False, "c": 4096, "d": 1e-3, "e": "k"}),
    ],
)
def test_parse_and_write_again(text, name, options):
    call = Call.parse(text)
    assert (call.name, call.options) == (name, options)
    assert Call.parse(str(call)) == call


@pytest.mark.parametrize(
    ("text", "says"),
    [("zero:stage", "'stage' is not option=value"), ("zero:=3", "'=3' is not option=value"), ("", "names no technique"),
     (":stage=3", "names no technique"), ("zero:stage=2,stage=3", "option 'stage' is given twice")],
)  # fmt: skip
def test_malformed_call(text, says):
    with pytest.raises(UserError, match=says):
        Call.parse(text)


def test_tables_and_strings_say_the_same():
    table = Plan.parse([{"technique": "zero", "stage": 3}, "recompute"])
    assert table == Plan.parse(["zero:stage=3", "recompute"])
    assert table.has("zero")
    assert not table.has("lora")
    assert (table.option("zero", "stage"), table.option("zero", "x"), table.option("lora", "rank")) == (3, None, None)


@pytest.mark.parametrize("item", [3, None, ["zero"], {"stage": 3}, {"technique": 3}])
def test_what_is_no_technique(item):
    with pytest.raises(UserError, match=r"my\.toml: .* is not a technique"):
        Plan.parse([item], "my.toml")


def test_a_technique_given_twice():
    with pytest.raises(UserError, match="technique 'zero' is given twice"):
        Plan.parse(["zero:stage=1", "zero:stage=2"])


@pytest.mark.parametrize("name", registry())
def test_normalized_plans_survive_their_own_text(name):
    e: Experiment = normalize(pair_experiment(name))
    again = e.model_copy(update={"plan": Plan.parse(e.plan.strings())})
    assert normalize(again).plan == e.plan


def test_a_list_of_one():
    """``targets=o_proj`` cannot be told from a string until the technique says that it wants a list."""
    e = pair_experiment("lora")
    one = e.model_copy(update={"plan": Plan.parse(["lora:targets=o_proj"])})
    assert normalize(one).plan.strings() == [
        "lora:rank=8,alpha=16.0,targets=o_proj,dropout=0.0,rslora=false,dora=false"
    ]


def test_scalars():
    assert [scalar(x) for x in ("3", "3.5", "true", "4k", "a+b", "ab")] == [3, 3.5, True, 4096, ["a", "b"], "ab"]


def test_nearest_names():
    techniques = list(registry())
    assert nearest("flsh", techniques)[0] == "flash_attention"
    assert nearest("zeroo", techniques)[0] == "zero"
    assert nearest("LORA", techniques)[0] == "lora"
    assert nearest("precision", techniques)[0] == "mixed_precision"
    assert nearest("qqqqqq", techniques) == []
    assert "known: a, b" in str(unknown("thing", "qqqqqq", ["b", "a"], "here"))
    many = unknown("thing", "qqqqqq", [f"n{i}" for i in range(99)])
    assert "(99 in all)" in str(many)
