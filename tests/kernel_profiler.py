"""Which kernels run, by the profiler. It imports nothing else, for processes that are started to be watched."""

import torch

# Of PyTorch's kernels, the name of an operation that nothing else runs, by the name that we say.
MARKS = {
    "flash": ("_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    "efficient": ("_scaled_dot_product_efficient_attention",),
    "cudnn": ("_scaled_dot_product_cudnn_attention",),
}


def kernels_run(run) -> set[str]:
    """Which of PyTorch's fused kernels `run()` ran, by the profiler."""
    with torch.profiler.profile() as profiler:
        run()
    events = {event.key for event in profiler.key_averages()}
    return {name for name, marks in MARKS.items() if any(mark in event for mark in marks for event in events)}
