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
from typing import Any

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

# A GPT trained with trilGPT, a minimal training framework

{facts}

The license is not set. Choose one in the first lines of this file.

## Generate text

{code_note}Install torch and transformers (`pip install torch "transformers>=5"`), then:

```python
from transformers import pipeline

folder = "."  # or the name of this model on the hub
generate = pipeline("text-generation", folder{trust})
print(generate({prompt}, max_new_tokens={length})[0]["generated_text"])
```
"""
CODE_NOTE = """\
The folder contains modeling_trilgpt.py, the code of the model, which `trust_remote_code=True`
executes. Read it before you trust a folder from somebody else.

"""


def write_card(out: Path, run: Path, checkpoint: dict) -> None:
    """Write the model card of a checkpoint of a run into the exported folder `out`."""
    spec = checkpoint["tokenizer"]
    prompt = "The"
    if spec["name"] == "char":  # which may lack these letters
        prompt = from_spec(spec).decode([checkpoint["vocab_size"] // 2])
    trust = code_note = ""
    if "auto_map" in read_json(out / "config.json"):
        trust = ", trust_remote_code=True"
        code_note = CODE_NOTE
    card = CARD.format(
        facts=format_facts(list_facts(run, checkpoint)),
        code_note=code_note,
        trust=trust,
        prompt=json.dumps(prompt),
        # learned positions end at block_size
        length=min(100, max(1, checkpoint["model_config"]["block_size"] // 2)),
    )
    atomic_write(out / "README.md", card)


def list_facts(run: Path, checkpoint: dict) -> dict[str, Any]:
    """The facts about a model by name. Unknown facts are None, 0 or empty."""
    step = checkpoint["step"]
    summary = read_json(run / "summary.json")
    data = {}
    if "data" in summary:
        data = read_json(Path(summary["data"]) / "meta.json")
    curves = defaultdict(dict)
    if (run / "metrics.jsonl").exists():
        curves = read_curves(run)
    table_sizes = [w.numel() for name, w in checkpoint["model"].items() if "ngrams." in name]
    return {
        "command": shlex.join(map(hide_path, shlex.split(summary.get("command", "")))),
        "trilGPT commit": (summary.get("commit") or "").replace("+", " with changes"),
        "data": checkpoint["config"]["data"]["name"],
        "data, bytes": sum(data.get("bytes", {}).values()),
        "step": step,
        "training tokens": find_value(curves["tokens"], step),
        "validation loss, nats": find_value(curves["val/loss"], step),
        "validation, bits/byte": find_value(curves["val/bpb"], step),
        "parameters": summary.get("n_params"),
        "in the n-gram table": sum(table_sizes),
        "context, tokens": checkpoint["model_config"]["block_size"],
        "tokenizer": checkpoint["tokenizer"]["name"],
        "vocabulary": checkpoint["vocab_size"],
    }


def format_facts(facts: dict[str, Any]) -> str:
    """An indented block with a line for each known fact."""
    lines = []
    for name, fact in facts.items():
        if fact and not isinstance(fact, str):
            fact = f"{fact:,}"
        if fact:
            lines.append(f"{name:24}{fact}")
    return textwrap.indent(printable("\n".join(lines)), " " * 4)


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
