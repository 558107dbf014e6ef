"""Trained models by name: a run, or a model in the layout of Hugging Face transformers (hf:FOLDER)."""

from pathlib import Path
from typing import Any

from common.checkpoint_file import load_checkpoint
from common.run_dir import find_checkpoint, find_run
from model.huggingface.folder import find_folder, read_folder

HF = "hf:"


def find_pretrained_folder(run: str) -> Path:
    """The folder of a model. run: see load_pretrained. Raises UserError."""
    return find_folder(run.removeprefix(HF)) if run.startswith(HF) else find_run(run)


def find_pretrained(run: str, kind: str = "best") -> Path:
    """The file with the weights of a model. run, kind: see load_pretrained. Raises UserError."""
    return find_pretrained_folder(run) / "model.safetensors" if run.startswith(HF) else find_checkpoint(run, kind)


def load_pretrained(run: str, kind: str = "best") -> tuple[Path, dict[str, Any]]:
    """Load a model -> the file with its weights, and the content of a checkpoint.

    run: name or path of a run; or hf:NAME, a folder or a model of the Hugging Face hub, whose content is model_config,
        vocab_size, tokenizer and model.
    kind: of the checkpoint of a run, "best", "last" or "step-NNNNNN". Raises UserError.
    """
    path = find_pretrained(run, kind)
    return path, read_folder(path.parent) if run.startswith(HF) else load_checkpoint(path)
