"""Finds which attention kernels run, with the profiler. Subprocesses of tests import it, so it imports only torch."""

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
    events = {event.key for event in profiler.key_averages()}
    return {
        name
        for name, operations in KERNEL_OPERATIONS.items()
        if any(operation in event for operation in operations for event in events)
    }
