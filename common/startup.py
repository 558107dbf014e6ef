"""torch's optimizers, bared of wrappers that hide them from its compiler, which is not used on them.

The wrappers import the compiler in order to hide from it, and that takes two seconds of every start.
"""

from inspect import unwrap

import torch
from torch.optim import Optimizer


class Uncompiled(Optimizer):
    add_param_group = unwrap(Optimizer.add_param_group)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)


class AdamW(Uncompiled, torch.optim.AdamW):
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
