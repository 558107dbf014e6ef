"""The model card of an exported run: README.md, which the Hugging Face hub shows.

It has what is needed to judge the model and to train it again. A fact that the run folder does not
have is left out. Facts are an indented block, in which Markdown shows any text as it is.
"""

import re
import shlex
import textwrap
from pathlib import Path

from common.errors import printable
from common.files import atomic_write, read_json
from common.settings import format_value
from results.read import read_curves

# A model or a data set of the hub, as in train.init_from=hf:openai/gpt2.
HUB_NAME = re.compile(r"(hf:|^data\.repo=)[\w-][\w.-]*/[\w.-]+$")
CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
# license: choose one, such as mit, before you publish this model
---

# A GPT trained with trilGPT

{facts}

The license is not set. Choose one in the first lines of this file.

## Generate text

```python
from transformers import pipeline

folder = "."  # or the name of this model on the hub
generate = pipeline("text-generation", folder{trust})
print(generate("The")[0]["generated_text"])
```
"""


def write_card(out: Path, run: Path, checkpoint: dict) -> None:
    """Write the model card of a checkpoint of a run into the exported folder `out`."""
    step = checkpoint["step"]
    data = checkpoint["config"]["data"]
    summary = read_json(run / "summary.json")
    command = shlex.split(summary.get("command", ""))
    text = read_json(Path(summary.get("data", "")) / "meta.json")
    curves = read_curves(run) if (run / "metrics.jsonl").exists() else {}
    metrics = {  # the newest value of each metric, up to this step
        name: round(curve[i], 4) for name, curve in curves.items() for i in curve if i <= step
    }
    table = sum(w.numel() for name, w in checkpoint["model"].items() if "ngrams." in name)
    facts = {
        "command": shlex.join(remove_folders(word) for word in command),
        "commit of trilGPT": summary.get("commit"),
        "data": remove_folders(format_value(data.get("path") or data["name"])),
        "bytes of text": sum(text.get("bytes", {}).values()),
        "step": step,
        "tokens of training": metrics.get("tokens"),
        "validation loss, nats": metrics.get("val/loss"),
        "bits per byte": metrics.get("val/bpb"),
        "parameters": summary.get("n_params"),
        "of them, n-gram table": table,
        "context, tokens": checkpoint["model_config"]["block_size"],
        "tokenizer": checkpoint["tokenizer"]["name"],
        "vocabulary": checkpoint["vocab_size"],
    }
    lines = [f"{name:24}{value}" for name, value in facts.items() if value]
    block = textwrap.indent(printable("\n".join(lines)), " " * 4)
    config = read_json(out / "config.json")
    trust = ", trust_remote_code=True" if "auto_map" in config else ""
    atomic_write(out / "README.md", CARD.format(facts=block, trust=trust))


def remove_folders(word: str) -> str:
    """Shorten the paths in a word of a command line to their last part, unless they are remote."""
    if "://" in word or HUB_NAME.search(word):
        return word
    return re.sub(r"""[^=:,"'\[\]]*/(?=\w)""", "", word)
