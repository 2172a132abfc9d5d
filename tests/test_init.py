"""`ridgeline init` writes files that run, and shells complete what there is."""

import pytest
from typer.testing import CliRunner

from ridgeline import catalog, experiments
from ridgeline.cli import app
from ridgeline.cli.completion import clusters, models, techniques
from ridgeline.cli.init import TASKS
from ridgeline.predict import predict
from ridgeline.techniques.registry import registry


@pytest.mark.parametrize("task", TASKS)
def test_the_file_is_an_experiment(tmp_path, task):
    file = tmp_path / "mine.toml"
    done = CliRunner().invoke(app, ["init", str(file)], input=f"llama2-13b\n4xa100-80g-sxm\n{task}\n")
    assert done.exit_code == 0
    e = experiments.load(file)
    assert (e.model.name, e.cluster.label, e.task) == ("llama2-13b", "4xa100-80g-sxm", task)
    assert predict(e).metrics["tokens_per_s"].value > 0


def test_a_file_is_not_overwritten(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("kept")
    refused = CliRunner().invoke(
        app, ["init", str(file), "--model", "llama2-7b", "--on", "h100-sxm", "--task", "serve"]
    )
    assert "is there already" in str(refused.exception)
    assert file.read_text() == "kept"


def test_a_wrong_answer_is_one_message(tmp_path):
    for answers in ("llama9\nh100-sxm\nserve\n", "llama2-7b\nh900\nserve\n", "llama2-7b\nh100-sxm\ndance\n"):
        refused = CliRunner().invoke(app, ["init", str(tmp_path / "x.toml")], input=answers)
        assert refused.exception.what
        assert not (tmp_path / "x.toml").exists()


def test_completion():
    assert set(models("")) == set(catalog.models())
    assert models("llama2-13") == ["llama2-13b"]
    assert "8xa100-80g-sxm" in clusters("8xa1")
    assert "4x8xrtx4090" in clusters("4x8xrt")
    assert set(registry()) < set(techniques(""))
    assert techniques("zero:st") == ["zero:stage="]
    assert techniques("lora:rank=8,tar") == ["lora:rank=8,targets="]
    assert techniques("nothing:x") == []
