"""Times attention kernels and complete training steps side by side."""
