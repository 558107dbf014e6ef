"""Estimates a run before it starts: parameters, FLOPs, memory, time and micro-batch size."""
