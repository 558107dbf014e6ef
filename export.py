"""Export a trained model as a folder for transformers, and for all programs that read its format.

    python export.py run=mine                             writes runs/mine/huggingface
    python export.py run=mine out=folder dtype=bfloat16   half the size

keys:
  run=NAME              a run in runs/; last is the newest
  out=FOLDER            the folder to write
  dtype=bfloat16        or float16, float32: the type of the weights
  checkpoint=last       instead of best

docs/interoperability.md shows how to use the folder, and which models can be exported.
"""

if __name__ == "__main__":  # before the slow imports below, so that a typo is reported immediately
    from configs.cli import parse_config

    config = parse_config("export", __doc__)

import os
import shutil
import tempfile
from pathlib import Path

from common.checkpoint_file import load_checkpoint
from common.console import format_bytes
from common.errors import UserError
from common.run_dir import find_checkpoint, find_run
from configs.cli import run_process
from configs.schema import Export
from model import GPTConfig
from model.huggingface.architectures import find_architecture
from model.huggingface.folder import write_folder
from model.huggingface.model_card import format_model_card
from training.device import DTYPES


def main(config: Export) -> int:
    run, path = find_run(config.run), find_checkpoint(config.run, config.checkpoint)
    out = Path(os.path.normpath(config.out or run / "huggingface"))
    if out.exists():
        raise UserError(f"{out} exists; set another out, or remove it")
    checkpoint = load_checkpoint(path)
    model_type = find_architecture(GPTConfig.from_checkpoint(checkpoint["model_config"]), run.name)

    # write into a temporary folder first, so that `out` is complete or missing
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        partial = Path(folder, "export")
        write_folder(partial, checkpoint, model_type, DTYPES[config.dtype])
        (partial / "README.md").write_text(format_model_card(run, checkpoint), encoding="utf-8")
        if (run / "loss.png").exists():
            shutil.copy(run / "loss.png", partial)
        os.replace(partial, out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{path} -> {out} ({format_bytes(size)}, {config.dtype})")
    return 0


if __name__ == "__main__":
    run_process(main, config)
