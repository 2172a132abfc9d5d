"""The table of docs/beyond-memory.md: what lets a model exceed memory, beside every technique of the serving engine. A
pair that it marks runs, with the tokens of the same model without it (tests/serve/test_pairs.py); any other is refused
with one message."""

from pathlib import Path

import pytest
from tests.serve.test_pairs import CASES

from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.workload import Serve
from ridgeline.techniques.matrix import CPU, TINY
from ridgeline.techniques.registry import check, normalize, registry

COLUMNS = ("zero_inference", "moe_offload", "kv_offload", "prefix_store", "rtn", "gptq", "qmoe", "kv_quant", "flexgen",
           "hot_neurons")  # fmt: skip
ROWS = (*sorted(n for n, t in registry().items() if t.__module__.startswith("ridgeline.techniques.serving.")),
        "zero_inference", "moe_offload", "rtn", "gptq", "qmoe", "kv_quant")  # fmt: skip
DOCS = Path(__file__).parents[2] / "docs" / "beyond-memory.md"
BEGIN, END = "<!-- checked by tests/serve/test_beyond_memory_pairs.py -->\n", "<!-- end -->\n"


def refused(*names):
    """What a server says that is asked for both, or nothing."""
    known = registry()
    calls = tuple(Call(name=n, options=dict(known[n].card.example)) for n in names)
    model = TINY.model_copy(update={k: v for n in names for k, v in known[n].card.needs_model.items()})
    ranks = max(known[n].card.min_ranks for n in names)
    w = Serve(prompt_len=8, output_len=4, kv_cache_bytes=1 << 20, max_num_batched_tokens=12)
    cluster = Cluster(device=CPU, devices_per_node=ranks)
    try:
        check(normalize(Experiment(model=model, cluster=cluster, workload=w, plan=Plan(calls=calls))))
    except Incompatible as e:
        return f"{e.what}; {e.fix}"
    return ""


def runs(*names):
    return tuple(sorted(names, key=list(registry()).index)) in CASES


def table():
    """The lines of the table, and its notes: the messages that refuse, each once."""
    notes: list[str] = []
    lines = ["| | " + " | ".join(f"`{n}`" for n in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in ROWS:
        cells = []
        for column in COLUMNS:
            why = "" if row == column else refused(column, row)
            if row == column:
                cells.append("")
            elif not why:
                cells.append("✓" if runs(row, column) else "○")
            else:
                for name, part in ((column, "it"), (row, "the other")):  # one note for all pairs of a kind
                    why = why.replace(name, part)
                if why not in notes:
                    notes.append(why)
                cells.append(f"✗ {notes.index(why) + 1}")
        lines.append(f"| `{row}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{i}. {why}" for i, why in enumerate(notes, 1)), ""])


def test_the_table_of_the_docs_is_what_the_techniques_say():
    text = DOCS.read_text(encoding="utf-8")
    shown = text.partition(BEGIN)[2].partition(END)[0]
    assert shown == table(), f"docs/beyond-memory.md needs this table:\n{table()}"


@pytest.mark.parametrize("column", COLUMNS)
def test_every_pair_runs_or_is_refused_with_a_way_out(column):
    for row in ROWS:
        if row == column:
            continue
        why = refused(column, row)
        alone = refused(row)
        assert bool(why) != runs(row, column) or alone or row == "petals", f"{column} beside {row}: {why or 'neither'}"
        assert not why or ("; " in why and len(why) < 250 and "\n" not in why)
