"""Optimizers: how a model's parameters are updated, and optimizer state by parameter name.

To add an optimizer, write its config as a dataclass in training/config.py and list it there in
OPTIMIZER_CONFIGS. Then write a function here that returns torch optimizers over all parameters, and
list it in OPTIMIZERS (docs/hacking.md). A new optimizer class has its own file, as Muon in muon.py.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from inspect import unwrap

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.process import without_dynamo
from training.config import AdamWConfig, MuonConfig, OptimizerConfig
from training.muon import Muon
from training.parallel import full_tensor, shard_like


@without_dynamo
class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW that does not import torch._dynamo."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


def build_adamw(model: nn.Module, config: AdamWConfig, dtype: torch.dtype) -> list[Optimizer]:
    """AdamW on all parameters.

    Biases and norms have no weight decay: the weights of a norm belong near 1, not near 0.
    """
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [AdamW(groups, config.lr, tuple(config.betas), config.eps, fused=True)]


def build_muon(model: nn.Module, config: MuonConfig, dtype: torch.dtype) -> list[Optimizer]:
    """Muon on the matrices of the blocks, AdamW on all other parameters.

    AdamW has three learning rates: for embeddings, head, and norms and biases.
    """
    params = defaultdict(list)
    for name, p in model.named_parameters():  # a tied head is part of the embeddings
        part = "vectors" if p.ndim < 2 else name.partition(".")[0]
        params[part].append(p)
    muon = Muon(
        params.pop("blocks"),
        config.lr,
        config.momentum,
        config.weight_decay,
        config.ns_steps,
        # float16 lacks the range of float32
        dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16,
    )
    # An embedding gets gradients from few tokens of a batch, and the head from all of them.
    lr = {"lm_head": config.head_lr, "vectors": config.norm_lr}
    # The n-gram table has most weights, and a row is for few places of the text: it would memorize
    # them. A row of the other embeddings and of the head is used often.
    weight_decay = {"ngrams": config.ngram_weight_decay}
    groups = [
        {
            "params": group,
            "lr": lr.get(part, config.embedding_lr),
            "weight_decay": weight_decay.get(part, 0.0),
        }
        for part, group in params.items()
    ]
    return [muon, AdamW(groups, betas=tuple(config.betas), eps=config.eps, fused=True)]


OPTIMIZERS: dict[str, Callable[..., list[Optimizer]]] = {
    "adamw": build_adamw,
    "muon": build_muon,
}


def build_optimizers(
    model: nn.Module, config: OptimizerConfig, dtype: torch.dtype = torch.float32
) -> list[Optimizer]:
    """Build the configured optimizers over all parameters of the model.

    dtype: of the forward and backward pass.
    """
    optimizers = OPTIMIZERS[config.name](model, config, dtype)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_lr(optimizers: list[Optimizer], scale: float) -> None:
    """Set all learning rates to `scale` times their peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale


def optimizer_step(
    model: nn.Module,
    optimizers: list[Optimizer],
    scaler: torch.amp.GradScaler,
    max_grad_norm: float | None,
) -> Tensor:
    """Clip the gradients, step all optimizers, and clear the gradients.

    max_grad_norm: None does not clip.
    Returns the gradient norm before clipping.
    """
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
    grad_norm = full_tensor(grad_norm)
    # after a float16 overflow, all optimizers skip the step
    if not scaler.is_enabled() or grad_norm.isfinite():
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()
    model.zero_grad(set_to_none=True)  # the next backward pass writes, instead of adding to zeros
    return grad_norm


def state_by_name(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, dict]:
    """The state of all optimizers by parameter name: {name: {"exp_avg": tensor, ...}}."""
    by_param = {}
    for optimizer in optimizers:
        by_param |= optimizer.state
    return {name: by_param[p] for name, p in model.named_parameters() if p in by_param}


def load_state_by_name(
    model: nn.Module, optimizers: list[Optimizer], state: dict[str, dict]
) -> None:
    """Load what state_by_name returned. Learning rates, betas and weight decay do not change."""
    by_param = {p: state[name] for name, p in model.named_parameters() if name in state}
    for optimizer in optimizers:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        by_index = {}
        for i, p in enumerate(params):
            if p in by_param:
                by_index[i] = {key: shard_like(tensor, p) for key, tensor in by_param[p].items()}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": by_index, "param_groups": groups})
