"""Teachers and a student: with train.n_teachers, a run trains several models, one after the other.

Models of one short text overfit in different ways, so the mean of their probabilities is better
than each of them (deep ensembles, Lakshminarayanan et al., arXiv:1612.01474). The last model, the
student, learns this mean instead of the text (distillation, Hinton et al., arXiv:1503.02531). It
is the result of the run, as large and as fast as each of its teachers.

Teachers have the same number of steps. They differ in their initial weights and in the order in
which they read the text. The student starts with the weights of the last teacher. It has no weight
decay and up to four times the steps, because it overfits less: its targets are not single tokens
(docs/experiments/teachers.md).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.optim import Optimizer

from generation.load import model_from_weights
from model.gpt import GPT
from model.loss import IGNORE_INDEX
from training.parallel import full_tensor


def make_teacher(model: GPT, weights: Mapping[str, Tensor]) -> GPT:
    """A model like `model` with a copy of these weights, on its device. It is not trained.

    weights: of a state_dict. If they are sharded, all processes must call this function.
    """
    device = model.wte.weight.device
    copies = {name: full_tensor(p).to(device, copy=True) for name, p in weights.items()}
    teacher = model_from_weights(model.config, model.vocab_size, model.attend, copies)
    return teacher.requires_grad_(False).eval()


def turn_off_weight_decay(optimizers: list[Optimizer]) -> None:
    """Train without weight decay from now on."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0


@torch.no_grad()
def mean_probabilities(
    teachers: list[GPT],
    tokens: Tensor,
    targets: Tensor,
    doc_ids: Tensor | None,
    autocast: AbstractContextManager,
) -> Tensor:
    """The teachers' probabilities of the next tokens, averaged: (B, T, V), float32.

    tokens, targets (B, T), doc_ids: as for GPT. Rows are zero where the target is not counted.
    autocast: mixed precision of the forward passes.
    """
    total = torch.zeros(*tokens.shape, teachers[0].vocab_size, device=tokens.device)
    with autocast:
        for teacher in teachers:
            logits = teacher(tokens, doc_ids=doc_ids)
            total += logits.softmax(dim=-1, dtype=torch.float32)
    is_counted = (targets != IGNORE_INDEX).unsqueeze(-1)  # (B, T, 1)
    total *= is_counted / len(teachers)
    return total
