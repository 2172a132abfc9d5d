"""The options of `ridgeline finetune` that are its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Checkpoint = Annotated[Path, typer.Argument(help="Hugging Face checkpoint directory, with its tokenizer.")]
Data = Annotated[
    str,
    typer.Option(help="Chat, Alpaca or prompt/completion records (.jsonl, .json), or text: a file, a directory, …"),
]
Out = Annotated[Path, typer.Option(help="Output directory: the adapter, or the whole model if there is none.")]
Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps.")]
LearningRate = Annotated[
    float | None, typer.Option(help="Peak learning rate (default 2e-4 for what is added to the model, else 2e-5).")
]
SeqLen = Annotated[
    int | None, typer.Option(help="Sequence length (default 1024, capped at the model's context length).")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Global batch size, in sequences.")]
MicroBatchSize = Annotated[int | None, typer.Option(min=1, help="Micro-batch size per device, in sequences.")]
WarmupSteps = Annotated[int | None, typer.Option(min=0, help="Learning-rate warm-up steps (default 3 % of the steps).")]
WeightDecay = Annotated[float, typer.Option(min=0)]
Template = Annotated[
    str | None, typer.Option(help="Chat template: a Jinja file, or chatml, llama2, alpaca (the checkpoint's own).")
]
Packing = Annotated[bool, typer.Option(help="Pack several examples into a sequence; attention stays within each.")]
TrainOnPrompt = Annotated[bool, typer.Option(help="Compute the loss on prompts, too.")]
SkipBad = Annotated[bool, typer.Option(help="Skip unreadable records, and report how many.")]
EvalEvery = Annotated[
    int | None, typer.Option(min=0, help="Steps between evaluations (default a tenth of the steps); 0 to disable.")
]
EvalBatches = Annotated[int, typer.Option(min=1, help="Number of held-out evaluation batches.")]
Adapter = Annotated[Path | None, typer.Option(help="Continue from this adapter (a PEFT directory).")]
Merged = Annotated[bool, typer.Option(help="Write the whole model with the adapter merged.")]
SaveEvery = Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0 to disable.")]
AsyncSave = Annotated[
    bool, typer.Option(help="Write checkpoints while training goes on; each rank's host memory holds its part.")
]
Resume = Annotated[bool, typer.Option(help="Resume where the same command was stopped.")]
Tokenizer = Annotated[str | None, typer.Option(help="Path to a tokenizer.json, if the checkpoint has none.")]
Dtype = Annotated[str, typer.Option(help="Storage dtype of the weights: auto, fp32, bf16.")]
Seed = Annotated[int, typer.Option(help="Random seed of adapters and data order.")]
DeviceMemory = Annotated[str | None, typer.Option(help="Memory limit per device: 600MB, …")]
