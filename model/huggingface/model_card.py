"""The model card: README.md of an exported folder, with the facts of the training."""

from pathlib import Path

from common.console import format_si
from common.run_dir import read_summary

TEMPLATE = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A language model with {parameters} parameters, trained with trilGPT. It continues text, and does not follow
instructions.

```python
from transformers import pipeline

generate = pipeline("text-generation", "FOLDER")  # the folder of this file
print(generate("The")[0]["generated_text"])
```

| | |
|---|---|
{facts}
"""


def format_model_card(run: Path, checkpoint: dict) -> str:
    """The text of the card. run: the run folder. checkpoint: the content of the exported checkpoint."""
    summary, model, step = read_summary(run), checkpoint["model_config"], checkpoint["step"]
    tokens = step * checkpoint["config"]["train"]["batch_size"] * model["block_size"]
    facts = {
        "architecture": f"{model['n_layer']} layers, {model['n_head']} heads, {model['n_embd']} channels",
        "context": f"{model['block_size']:,} tokens",
        "tokenizer": f"{checkpoint['tokenizer']['name']}, {checkpoint['vocab_size']:,} tokens",
        "training data": checkpoint["identity"]["data.name"],
        "training": f"{step:,} steps, {format_si(tokens)} tokens",
    }
    if step == checkpoint["best_step"]:
        facts["validation loss"] = f"{checkpoint['best_val_loss']:.4f} nats per token"
        facts["bits per byte"] = f"{checkpoint['best_val_bpb']:.4f}"
    facts |= {key: summary[key] for key in ("device_name", "command", "commit") if summary.get(key)}
    facts["versions"] = ", ".join(f"{name} {version}" for name, version in summary.get("versions", {}).items())
    rows = [f"| {key.replace('_', ' ')} | {str(value).replace('|', chr(92) + '|')} |" for key, value in facts.items()]
    parameters = format_si(summary.get("n_params", sum(w.numel() for w in checkpoint["model"].values())))
    picture = "\n![Training and validation loss](loss.png)\n" if (run / "loss.png").exists() else ""
    return TEMPLATE.format(name=run.name, parameters=parameters, facts="\n".join(rows)) + picture
