"""Many trainings side by side (sweep/), finished runs compared (runs/), attention kernels timed (bench/)."""
