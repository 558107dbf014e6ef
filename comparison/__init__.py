"""Sweeps over settings (sweep/), comparison of finished runs (runs/), and timing of attention backends (bench/)."""

MAX_SPREAD = 1.5  # upper / lower quartile of times. A larger ratio means that the machine was busy.
