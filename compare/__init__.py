"""Sweeps over settings (sweep/), comparison of finished runs (runs/), and timing of attention backends (bench/)."""

MAX_SPREAD = 1.5  # upper quartile / lower quartile of a time; a larger one means that the machine was busy
