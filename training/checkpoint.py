"""One file of tensors and plain values: written whole or not at all, checked when it is read.

format, step, seconds, best_val_loss, wandb_id
model          {name: tensor}             the same names whether the run was compiled or not
optimizer      {name: {state}}            all optimizers in one
scaler         the gradient scaler's state; empty where none was used
vocab_size, tokenizer, model_config       enough to sample from the file alone
identity       what must not change when a run continues
config         the whole run config, for readers; nothing is built from it
"""

import math
import os
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from errors import UserError
from training.optimizer import load_state_by_name, state_by_name

FORMAT = 3


@dataclass
class State:
    """Everything that a step changes: the weights, and how far the run has come."""

    model: nn.Module
    optimizers: list[Optimizer]
    scaler: torch.amp.GradScaler
    step: int = 0  # optimizer steps done
    seconds: float = 0.0
    best_val_loss: float = math.inf
    wandb_id: str | None = None

    def counters(self) -> dict:
        return {key: getattr(self, key) for key in ("step", "seconds", "best_val_loss", "wandb_id")}

    def summary(self) -> dict:
        """How far the run has come, as summary.json names it."""
        return {"step": self.step, "best_val_loss": self.best_val_loss, "wall_seconds": self.seconds}

    def save(self, path: Path, about: dict) -> None:
        """`about`: what does not change, see `about` below."""
        tensors = {
            "model": self.model.state_dict(),
            "optimizer": state_by_name(self.model, self.optimizers),
            "scaler": self.scaler.state_dict(),
        }
        save(path, about | self.counters() | tensors)

    def restore(self, saved: dict) -> None:
        self.model.load_state_dict(saved["model"])
        load_state_by_name(self.model, self.optimizers, saved["optimizer"])
        if saved["scaler"]:  # empty where the run had none, and a new one starts afresh
            self.scaler.load_state_dict(saved["scaler"])
        for key in self.counters():
            setattr(self, key, saved[key])


def about(config: Any, meta: dict) -> dict:
    """What a checkpoint says of itself beside the state, from the run's config and the prepared data's meta.json."""
    model = asdict(config.model)
    return {
        "model_config": model,
        "vocab_size": meta["vocab_size"],
        "tokenizer": meta["tokenizer"],
        "identity": {f"model.{key}": value for key, value in model.items() if key not in ("name", "dropout")}
        | {"data.name": meta["source"]["name"], "data": meta["fingerprint"]}
        | {"data.document_mask": config.data.document_mask}
        | {f"data.mix.{name}.weight": part.weight for name, part in config.data.mix.items()}
        | {"tokenizer.name": config.tokenizer.name, "vocabulary": meta["vocab_size"]}
        | {"train.init_from": config.train.init_from}
        | {"optimizer.name": config.optimizer.name, "train.batch_size": config.train.batch_size},
        "config": asdict(config),
    }


def check_identity(path: Path, saved: dict, now: dict) -> None:
    """Raises UserError where a run would continue as something else, listing what differs."""
    differs = [key for key in now if saved.get(key) != now[key]]
    if differs:
        listed = ", ".join(f"{key}={saved.get(key)} (now {now[key]})" for key in differs[:4])
        if len(differs) > 4:
            listed += f" and {len(differs) - 4} more, all in its config.yaml and the command in its summary.json"
        raise UserError(f"{path} was trained with {listed}; set that back, or set another name")


def save(path: Path, content: dict) -> None:
    """Write to another name, make sure it is on the disk, rename: whatever happens, `path` is a whole checkpoint."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as f:
        torch.save(content | {"format": FORMAT}, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name, too
    os.close(folder)


def load(path: Path) -> dict:
    """The content of a checkpoint, tensors on the CPU. Raises UserError where it is missing, damaged or unknown.

    One that is replaced meanwhile is read whole, as it was or as it is then.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; train first, or name a run that has a checkpoint")
    while True:
        file = _which(path)
        content, damaged = _read(path)
        if _which(path) == file:  # else torch, which opens it more than once, may have read half of each
            break
    if damaged is not None:
        raise UserError(
            f"{path} is damaged ({damaged}); copy the run's other checkpoint over it, or remove both to start anew"
        )
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT or "step" not in content:
        raise UserError(f"{path} has checkpoint format {found}, and this version reads {FORMAT}; name another run")
    return content


def _read(path: Path) -> tuple[Any, str | None]:
    """The content, and what is damaged; None: nothing."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load itself does not notice a flipped bit
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True) if damaged is None else None
    except Exception as error:  # a flipped bit can make anything of a file, and torch and zipfile any exception of it
        return None, type(error).__name__
    return content, damaged


def _which(path: Path) -> tuple[int, int, int]:
    """Another after the file was replaced."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size
