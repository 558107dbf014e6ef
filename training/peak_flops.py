"""Peak FLOP/s of a device: the figure that MFU (model FLOPs utilization) is relative to."""

import torch

from training.speed import time_repeatedly

# Peak FLOP/s of dense matrix products, from the data sheets. The names are complete: variants of
# the same family (laptop, PCIe, partitioned) are slower, so their peak is measured.
GPU_PEAK = {  # name: (16 bits, float32)
    "NVIDIA H200": (989e12, 67e12),
    "NVIDIA H100 80GB HBM3": (989e12, 67e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 19.5e12),
    "NVIDIA GeForce RTX 4090": (165e12, 82.6e12),
    "Tesla T4": (65e12, 8.1e12),
}


def is_in_table(device: torch.device) -> bool:
    """Whether the peak FLOP/s of a device is known, not measured."""
    return device.type == "cuda" and torch.cuda.get_device_name(device) in GPU_PEAK


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of matrix products on one device.

    From GPU_PEAK, otherwise of the fastest of a few large products.
    """
    is_float32 = dtype == torch.float32
    is_tf32 = is_float32 and torch.get_float32_matmul_precision() != "highest"
    if is_in_table(device) and not is_tf32:
        half_peak, float32_peak = GPU_PEAK[torch.cuda.get_device_name(device)]
        return float32_peak if is_float32 else half_peak
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    fastest = min(time_repeatedly(lambda: a @ a, device, 4))
    return 2 * size**3 / fastest
