"""Peak FLOP/s of a device: the figure that MFU is relative to."""

import torch

from training.speed import time_repeatedly

# Peak FLOP/s of dense matrix products in 16 bits and in float32, from the data sheets. Keys are full names of GPUs:
# variants of the same family (laptop, PCIe, partitioned) are slower, so their peak is measured.
GPU_PEAK = {
    "NVIDIA H200": (989e12, 67e12),
    "NVIDIA H100 80GB HBM3": (989e12, 67e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 19.5e12),
    "NVIDIA GeForce RTX 4090": (165e12, 82.6e12),
    "Tesla T4": (65e12, 8.1e12),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of matrix products on one device: from GPU_PEAK, else the fastest of a few large products."""
    is_cuda = device.type == "cuda"
    is_tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    if is_cuda and not is_tf32 and (known := GPU_PEAK.get(torch.cuda.get_device_name(device))):
        return known[dtype == torch.float32]
    size = 8192 if is_cuda else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / min(time_repeatedly(lambda: a @ a, device, 4))
