"""The table of docs/beyond-memory.md: what lets a model exceed memory, beside every technique of the serving engine. A
pair that it marks runs, with the tokens of the same model without it (tests/serve/test_pairs.py; a checkpoint that was
compressed: here); any other is refused with one message."""

from pathlib import Path

import pytest
from tests.compressing import MIXTRAL, checkpoint, squeeze
from tests.serve.test_pairs import CASES, SERVES
from tests.serving import ask, run

from ridgeline.serve.build_engine import load_engine
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.workload import Serve
from ridgeline.techniques.matrix import CPU, TINY
from ridgeline.techniques.registry import check, normalize, registry

COLUMNS = ("zero_inference", "moe_offload", "kv_offload", "prefix_store", "rtn", "gptq", "kv_quant", "qmoe", "flexgen",
           "hot_neurons")  # fmt: skip
ROWS = (*sorted(n for n, t in SERVES.items() if t.__module__.startswith("ridgeline.techniques.serving.")),
        "zero_inference", "moe_offload", "kv_quant")  # fmt: skip
CHECKPOINT = "qmoe"
"""The column of a checkpoint that was compressed before; it is no part of the server's plan."""
DOCS = Path(__file__).parents[2] / "docs" / "beyond-memory.md"
BEGIN, END = "<!-- checked by tests/serve/test_beyond_memory_pairs.py -->\n", "<!-- end -->\n"


def refused(*names):
    """What a server says that is asked for all of them, or nothing."""
    known = registry()
    model = TINY.model_copy(update={k: v for n in names for k, v in known[n].card.needs_model.items()})
    calls = [Call(name=n, options=dict(known[n].card.example)) for n in names if n != CHECKPOINT]
    w = Serve(prompt_len=8, output_len=4, kv_cache_bytes=1 << 20, max_num_batched_tokens=12)
    try:
        check(
            normalize(Experiment(model=model, cluster=Cluster(device=CPU), workload=w, plan=Plan(calls=tuple(calls))))
        )
    except Incompatible as e:
        return f"{e.what}; {e.fix}"
    return ""


def table():
    """The lines of the table, and its notes: the messages that refuse, one for all pairs of a kind."""
    notes: dict[str, str] = {}
    lines = ["| | " + " | ".join(f"`{n}`" for n in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in ROWS:
        cells = []
        for column in COLUMNS:
            why = "" if row == column else refused(column, row)
            if why:
                notes.setdefault(why.replace(column, "…").replace(row, "…"), why)
                cells.append(f"✗ {list(notes.values()).index(notes[why.replace(column, '…').replace(row, '…')]) + 1}")
            else:
                cells.append("" if row == column else "✓")
        lines.append(f"| `{row}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{i}. {why}" for i, why in enumerate(notes.values(), 1)), ""])


def test_the_table_of_the_docs_is_what_the_techniques_say():
    shown = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert shown == table(), f"docs/beyond-memory.md needs this table:\n{table()}"


@pytest.mark.parametrize("column", [c for c in COLUMNS if c != CHECKPOINT])
def test_what_is_not_refused_is_run_by_the_tests_of_pairs(column):
    known = list(registry())
    for row in ROWS:
        if row != column:
            why, names = refused(column, row), tuple(sorted((column, row), key=known.index))
            assert bool(why) != (names in CASES), f"{column} beside {row}: {why}"
            assert not why or ("; " in why and "\n" not in why)


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    """A mixture with words of under a bit for its experts."""
    folder = tmp_path_factory.mktemp("coded")
    squeeze(checkpoint(folder / "m", {**MIXTRAL, "num_layers": 2}), folder / "coded", CHECKPOINT)
    return folder / "coded"


def served(source, *more):
    e = load_engine(source, more, kv_cache_bytes=1 << 18, max_model_len=60)
    prompts = [list(range(1, 30)), [5, 6, 7], list(range(1, 25))]
    return run(e, *(ask(str(i), p, 6) for i, p in enumerate(prompts)))[0]


@pytest.mark.parametrize("row", [r for r in ROWS if not refused(CHECKPOINT, r)])
def test_a_compressed_checkpoint(coded, row):
    card = registry()[row].card
    options = ",".join(f"{k}={v}" for k, v in card.example.items())
    plain = served(coded)
    if not card.lossless:  # the same as itself, once more
        plain = served(coded, f"{row}:{options}" if options else row)
    assert served(coded, f"{row}:{options}" if options else row) == plain
