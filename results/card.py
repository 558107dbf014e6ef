"""The model card of an exported run: README.md, which the Hugging Face hub shows.

It has what is needed to judge the model and to train it again. A fact that the run folder does not
have is left out. Facts are an indented block, in which Markdown shows any text as it is.
"""

import json
import re
import shlex
import textwrap
from collections import defaultdict
from pathlib import Path

from common.errors import printable
from common.files import atomic_write, read_json
from data.tokenizer import from_spec
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

Install torch and transformers (`pip install torch transformers`), then:

```python
from transformers import pipeline

folder = "."  # or the name of this model on the hub
generate = pipeline("text-generation", folder{trust})
print(generate({prompt}, max_new_tokens={length})[0]["generated_text"])
```
"""


def write_card(out: Path, run: Path, checkpoint: dict) -> None:
    """Write the model card of a checkpoint of a run into the exported folder `out`."""
    step = checkpoint["step"]
    spec = checkpoint["tokenizer"]
    block_size = checkpoint["model_config"]["block_size"]
    summary = read_json(run / "summary.json")
    words = map(hide_path, shlex.split(summary.get("command", "")))
    data = {}
    if "data" in summary:
        data = read_json(Path(summary["data"]) / "meta.json")
    curves = defaultdict(dict)
    if (run / "metrics.jsonl").exists():
        curves = read_curves(run)
    table_sizes = [w.numel() for name, w in checkpoint["model"].items() if "ngrams." in name]
    facts = {
        "command": shlex.join(words),
        "trilGPT commit": (summary.get("commit") or "").replace("+", " with changes"),
        "data": checkpoint["config"]["data"]["name"],
        "data, bytes": sum(data.get("bytes", {}).values()),
        "step": step,
        "training tokens": find_value(curves["tokens"], step),
        "validation loss, nats": find_value(curves["val/loss"], step),
        "bits per byte": find_value(curves["val/bpb"], step),
        "parameters": summary.get("n_params"),
        "in the n-gram table": sum(table_sizes),
        "context, tokens": block_size,
        "tokenizer": spec["name"],
        "vocabulary": checkpoint["vocab_size"],
    }
    lines = []
    for name, fact in facts.items():
        if fact:
            lines.append(f"{name:24}{fact if isinstance(fact, str) else f'{fact:,}'}")
    prompt = "The"
    if spec["name"] == "char":  # which may lack these letters
        prompt = from_spec(spec).decode([checkpoint["vocab_size"] // 2])
    is_own_class = "auto_map" in read_json(out / "config.json")
    card = CARD.format(
        facts=textwrap.indent(printable("\n".join(lines)), " " * 4),
        trust=", trust_remote_code=True" if is_own_class else "",
        prompt=json.dumps(prompt),
        length=min(100, max(1, block_size // 2)),  # learned positions end at block_size
    )
    atomic_write(out / "README.md", card)


def find_value(curve: dict[int, float], last_step: int) -> float | None:
    """The newest value of a curve up to a step, rounded. None: it has none."""
    values = [value for step, value in curve.items() if step <= last_step]
    return round(values[-1], 4) if values else None


def hide_path(word: str) -> str:
    """Replace a value with folders or a URL in a word of a command line by three dots."""
    if HUB_NAME.search(word) or not any(mark in word for mark in "/\\~"):
        return word
    key, separator, _ = word.partition("=")
    return f"{key}=..." if separator else "..."
