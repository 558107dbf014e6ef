"""Which attention kernels run, from the profiler. Test processes import this file, so it imports only torch."""

import torch

# The name of an operation that only this kernel runs, by our name of the kernel.
KERNEL_OPERATIONS = {
    "flash": ("_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    "efficient": ("_scaled_dot_product_efficient_attention",),
    "cudnn": ("_scaled_dot_product_cudnn_attention",),
}


def reserve(size: int) -> int:
    """Allocate memory without using it."""
    return len(bytearray(size))


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
