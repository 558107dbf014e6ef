"""Optimizers: parameter groups, the optimizer step, and state by parameter name.

To add an optimizer, write a function here and list it in OPTIMIZERS, add its dataclass to training/config.py and
configs/schema.py, and a YAML file to configs/optimizer/. The function returns a list of optimizers. Each parameter
group has a `peak_lr`, which the schedule scales.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.errors import UserError
from common.startup import AdamW
from training.config import AdamWConfig, MuonConfig
from training.muon import Muon
from training.sharding import full_tensor, shard_like


def _group(params: list[nn.Parameter], lr: float, weight_decay: float) -> dict:
    return {"params": params, "lr": lr, "peak_lr": lr, "weight_decay": weight_decay}


def adamw(model: nn.Module, config: AdamWConfig, dtype: torch.dtype) -> list[Optimizer]:
    """AdamW on all parameters. Biases and norms, which have fewer than two dimensions, have no weight decay."""
    params = list(model.parameters())
    groups = [
        _group([p for p in params if p.ndim >= 2], config.lr, config.weight_decay),
        _group([p for p in params if p.ndim < 2], config.lr, 0.0),
    ]
    groups = [group for group in groups if group["params"]]
    return [AdamW(groups, betas=tuple(config.betas), eps=config.eps, fused=True)]


def muon(model: nn.Module, config: MuonConfig, dtype: torch.dtype) -> list[Optimizer]:
    """Muon on the matrices of the blocks. AdamW with three learning rates on embeddings, head, and norms and biases."""
    muon_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16  # whose range is that of float32
    in_blocks = {id(p) for p in model.blocks.parameters() if p.ndim == 2}
    matrices = [p for p in model.parameters() if id(p) in in_blocks]
    ngram_table = [] if model.ngrams is None else [model.ngrams.table.weight]
    head = [] if model.lm_head.weight is model.wte.weight else [model.lm_head.weight]
    others = in_blocks | {id(p) for p in ngram_table + head}
    embeddings = [p for p in model.parameters() if p.ndim == 2 and id(p) not in others]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        _group(embeddings, config.embedding_lr, 0.0),
        _group(ngram_table, config.embedding_lr, config.ngram_weight_decay),
        _group(head, config.head_lr, 0.0),
        _group(vectors, config.norm_lr, 0.0),
    ]
    groups = [group for group in groups if group["params"]]
    return [
        Muon(
            [_group(matrices, config.lr, config.weight_decay)],
            config.lr,
            config.momentum,
            0.0,
            config.ns_steps,
            muon_dtype,
        ),
        AdamW(groups, betas=tuple(config.betas), eps=config.eps, fused=True),
    ]


OPTIMIZERS: dict[str, Callable[..., list[Optimizer]]] = {f.__name__: f for f in (adamw, muon)}


def build_optimizers(
    model: nn.Module, config: AdamWConfig | MuonConfig, dtype: torch.dtype = torch.float32
) -> list[Optimizer]:
    """Build the configured optimizers over all parameters of the model, for a run in `dtype`. Raises UserError."""
    if config.name not in OPTIMIZERS:
        raise UserError(f"optimizer.name={config.name} is unknown; set one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[config.name](model, config, dtype)


def optimizer_step(
    model: nn.Module, optimizers: list[Optimizer], scaler: torch.amp.GradScaler, max_grad_norm: float | None
) -> Tensor:
    """Clip the gradients, step all optimizers, and clear the gradients -> the gradient norm before clipping.

    max_grad_norm None: no clipping. After a float16 overflow, the scaler skips the step. The overflow can be in the
    parameters of one optimizer only, so the norm over all parameters decides for all optimizers.
    """
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    grad_norm = full_tensor(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf))
    if not scaler.is_enabled() or grad_norm.isfinite():
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()
    model.zero_grad(set_to_none=True)
    return grad_norm


def set_lr(optimizers: list[Optimizer], scale: float) -> None:
    """Set all learning rates to `scale` times their peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale


def state_by_name(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, dict]:
    """The state of all optimizers by parameter name: {name: {"exp_avg": tensor, ...}}."""
    state = {p: s for optimizer in optimizers for p, s in optimizer.state.items()}
    return {name: state[p] for name, p in model.named_parameters() if p in state}


def load_state_by_name(model: nn.Module, optimizers: list[Optimizer], state: dict[str, dict]) -> None:
    """Load what state_by_name returned. Learning rates, betas and weight decay stay those of the config."""
    names = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        by_index = {
            i: {key: shard_like(value, p) for key, value in state[names[p]].items()}
            for i, p in enumerate(params)
            if names[p] in state
        }
        optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})
