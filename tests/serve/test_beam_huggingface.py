"""Beam search against Hugging Face's, on the same weights."""

import pytest
import torch
from tests.serving import ask, engine, model, run

from ridgeline.nn.checkpoint.checkpoint import save_checkpoint

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Ours in fp64, and transformers' of the same weights."""
    made = model()
    folder = tmp_path_factory.mktemp("beam")
    save_checkpoint(made, folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return made, theirs.eval()


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("early", [False, True])
def test_beams_equal_hugging_face(pair, width, length_penalty, early):
    made, theirs = pair
    ends = [7, 11, 23, 200, 150, 33]
    eng = engine(made, ends=ends)
    for seed in range(3):
        prompt = torch.randint(300, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
        got, events = run(eng, ask(f"p{seed}", prompt, 12, beam_width=width, n=width, length_penalty=length_penalty,
                                   early_stopping=early))  # fmt: skip
        out = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, num_beams=width, num_return_sequences=width, do_sample=False,
            length_penalty=length_penalty, early_stopping=early, eos_token_id=ends, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        scores = {e.index: e.score for e in events}
        for i in range(width):
            tokens = out.sequences[i, 6:].tolist()
            mine = got[f"p{seed}", i]
            assert tokens[: len(mine)] == mine
            assert len(set(tokens[len(mine) :])) < 2  # padding
            assert scores[i] == pytest.approx(float(out.sequences_scores[i]))
