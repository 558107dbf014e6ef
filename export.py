"""Export a trained model as a folder for transformers, and for all programs that read its format.

    python export.py run=mine                             writes runs/mine/huggingface
    python export.py run=mine out=folder dtype=bfloat16   half the size

keys:
  run=NAME              a run in runs/; last is the newest
  out=FOLDER            the folder to write
  dtype=bfloat16        or float16, float32: the type of the weights
  checkpoint=last       instead of best; or step-500, if checkpoint.keep has kept it

README.md in the folder is a model card. Choose a license there before you publish the model.
docs/interoperability.md shows how to use the folder, and which programs can read it.
"""

if __name__ == "__main__":  # before the slow imports below, so that a typo is reported immediately
    from configs.cli import parse_config

    config = parse_config("export", __doc__)

import os
from pathlib import Path

from common.checkpoint_file import load_checkpoint
from common.console import PYTHON
from common.files import new_folder
from common.machine import DTYPES
from common.process import run_process
from common.run_paths import find_checkpoint
from configs.schema import ExportConfig
from huggingface.architectures import find_architecture
from huggingface.folder import write_folder
from model import GPTConfig
from results.card import write_card


def main(config: ExportConfig) -> int:
    path = find_checkpoint(config.run, config.checkpoint)
    run = path.parents[1]
    checkpoint = load_checkpoint(path)
    out = Path(os.path.expanduser(config.out or run / "huggingface"))
    model_type = find_architecture(GPTConfig.from_saved(checkpoint["model_config"]))
    with new_folder(out) as unfinished:
        write_folder(unfinished, checkpoint, model_type, DTYPES[config.dtype])
        write_card(unfinished, run, checkpoint)
    print(f"{path} -> {out}")
    print(f"next     {PYTHON} sample.py run=hf:{out}, or see {out / 'README.md'} for transformers")
    return 0


if __name__ == "__main__":
    run_process(main, config)
