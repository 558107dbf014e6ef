"""Export a trained model for other programs: transformers, llama.cpp, and all that read their formats.

    python export.py run=mine                             a folder for transformers: runs/mine/huggingface
    python export.py run=mine out=folder dtype=bfloat16   half the size
    python export.py run=mine format=gguf out=mine.gguf   a file for llama.cpp

keys:
  run=NAME              a run in runs/; last is the newest
  out=PATH              the folder or the file to write
  format=gguf           a file for llama.cpp; needs the package gguf
  dtype=bfloat16        or float16, float32: the type of the weights
  checkpoint=last       instead of best

docs/interoperability.md shows how to use the result, and which models can be exported.
"""

if __name__ == "__main__":  # before the slow imports below, so that a typo is reported immediately
    from configs.cli import parse_config

    config = parse_config("export", __doc__)

import os
import shutil
import tempfile
from pathlib import Path

from common.console import format_bytes
from common.errors import UserError
from configs.cli import run_process
from configs.schema import Export
from model import GPTConfig
from model.huggingface.architectures import find_architecture
from model.huggingface.folder import write_folder
from model.huggingface.gguf import check_gguf, write_gguf
from model.huggingface.model_card import format_model_card
from model.pretrained import HF, find_pretrained_folder, load_pretrained
from training.device import DTYPES


def main(config: Export) -> int:
    run = find_pretrained_folder(config.run)
    path, checkpoint = load_pretrained(config.run, config.checkpoint)
    is_gguf, dtype = config.format == "gguf", DTYPES[config.dtype]
    out = Path(os.path.normpath(config.out or run / (f"{run.name}.gguf" if is_gguf else "huggingface")))
    if out.exists():
        raise UserError(f"{out} exists; set another out, or remove it")
    if not is_gguf and config.run.startswith(HF):
        raise UserError(f"{run} is already a folder for transformers; set format=gguf, or the name of a run")

    model_config = GPTConfig.from_checkpoint(checkpoint["model_config"])
    model_type = find_architecture(model_config, run.name)
    if is_gguf:
        check_gguf(model_config, model_type, checkpoint["tokenizer"], run.name)

    # write into a temporary folder first, so that `out` is complete or missing
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        partial = Path(folder, "export")
        if is_gguf:
            write_gguf(partial, checkpoint, model_type, run.name, dtype)
        else:
            write_folder(partial, checkpoint, model_type, dtype)
            (partial / "README.md").write_text(format_model_card(run, checkpoint), encoding="utf-8")
            if (run / "loss.png").exists():
                shutil.copy(run / "loss.png", partial)
        os.replace(partial, out)
    size = sum(file.stat().st_size for file in ([out] if is_gguf else out.iterdir()))
    print(f"{path} -> {out} ({format_bytes(size)}, {config.dtype})")
    return 0


if __name__ == "__main__":
    run_process(main, config)
