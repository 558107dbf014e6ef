"""Finds which attention kernels run, with the profiler.

Subprocesses of tests import it, so it imports only torch.
"""

import torch

# Kernel -> names of operations that only this kernel runs.
KERNEL_OPERATIONS = {
    "flash": ("_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    "efficient": ("_scaled_dot_product_efficient_attention",),
    "cudnn": ("_scaled_dot_product_cudnn_attention",),
}


def kernels_run(function) -> set[str]:
    """Names of PyTorch's fused kernels that `function()` runs."""
    with torch.profiler.profile() as profiler:
        function()
    events = " ".join(event.key for event in profiler.key_averages())
    kernels = set()
    for kernel, operations in KERNEL_OPERATIONS.items():
        if any(operation in events for operation in operations):
            kernels.add(kernel)
    return kernels
