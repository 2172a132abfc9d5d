"""Memory that is gone from the device: what processes and the ones that they start really allocate."""

import subprocess
import sys

import pytest
import torch
from tests.training import MODEL
from tests.world import world

from ridgeline.jobs.job import CellOptions, RankContext
from ridgeline.measure.bench import USED, with_device_use
from ridgeline.measure.cells.cell import measure_cell
from ridgeline.measure.device_use import DeviceUse
from ridgeline.predict import predict
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result
from ridgeline.spec.workload import Generate
from ridgeline.study import StudyFile
from ridgeline.study.run import run_study
from ridgeline.techniques.matrix import CPU

MIB = 1 << 20
SCRIPT = """
import subprocess, sys
import torch
from ridgeline.jobs.job import RankContext
from ridgeline.measure.device_use import DeviceUse

used = DeviceUse(RankContext(torch.device("cpu")))
print(used.bytes())
held = torch.ones(200 << 18)
del held
print(used.bytes())
child = subprocess.Popen([sys.executable, "-c", "x = b'1' * (100 << 20); print(1, flush=True); input()"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(used.bytes())
child.communicate("\\n")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is known on Linux")
def test_peak_of_freed_memory_and_of_children():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    before, peak, more = (int(line) / MIB for line in run.stdout.split())
    assert before < 100, "imports are not the model's"
    assert 200 <= peak < 230
    assert 100 <= more - peak < 150


def rank_use(rank):
    here = RankContext(torch.device("cpu"), rank, 2)
    used = DeviceUse(here)
    held = torch.ones((rank + 1) * 32 * MIB)  # 128 or 256 MiB
    own = used.bytes()
    value = used.metrics()[USED].value
    return own, value, held.numel()


def test_the_largest_of_the_ranks():
    (own, value, _), (other, same, _) = world(2).run(rank_use)
    assert value == same
    assert value >= max(own, other)


def test_cells_record_it_and_studies_show_it():
    e = Experiment(model=MODEL, cluster=Cluster(device=CPU), workload=Generate(prompt_len=8, output_len=2))
    r = Result.model_validate(measure_cell(e, CellOptions(), RankContext(torch.device("cpu"))))
    assert r.metrics[USED].value >= 0
    assert r.metrics[USED].unit == "bytes"
    predicted = predict(e)
    assert with_device_use(predicted).metrics[USED].value == predicted.peak_bytes


def test_a_studys_table_may_show_it(tmp_path):
    table = {"name": "memory", "workload": {"kind": "pretrain", "seq_len": 128}, "rows": ["model"],
             "axes": {"model": ["llama-mini"], "platform": ["rtx4090"]}, "show": [USED, "peak_bytes"]}  # fmt: skip
    (cell,) = run_study(StudyFile(name="used", tables=[table]), tmp_path, workers=1).cells
    assert cell.predicted[USED] == cell.predicted["peak_bytes"] > 0
