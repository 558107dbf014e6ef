"""Sweeps over settings (sweep/), comparison of finished runs (runs/), and timing of attention
backends (bench/)."""
