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
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from common.checkpoint_file import load_checkpoint
from common.console import PYTHON
from common.device import DTYPES
from common.errors import UserError
from configs.schema import ExportConfig
from generation.run_paths import find_checkpoint, find_run
from huggingface.architectures import find_architecture
from huggingface.folder import write_folder
from model import GPTConfig
from training.signals import run_process


def main(config: ExportConfig) -> int:
    run = find_run(config.run)
    path = find_checkpoint(config.run, config.checkpoint)
    out = Path(config.out or run / "huggingface")
    checkpoint = load_checkpoint(path)
    model_type = find_architecture(GPTConfig.from_saved(checkpoint["model_config"]), run.name)

    unfinished = out.with_name(f".{out.name}.unfinished")  # so that `out` is complete or missing
    with FileLock(f"{unfinished}.lock") as lock:  # makes the folder of `out`
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
        try:
            if out.exists():
                raise UserError(f"{out} exists; set another out, or remove it")
            write_folder(unfinished, checkpoint, model_type, DTYPES[config.dtype], run)
            os.replace(unfinished, out)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            with suppress(OSError):  # Windows does not remove an open file
                os.unlink(lock.lock_file)
    print(f"{path} -> {out}\nnext     {PYTHON} sample.py run=hf:{out}")
    return 0


if __name__ == "__main__":
    run_process(main, config)
