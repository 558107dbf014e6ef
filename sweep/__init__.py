"""Runs sweeps: each job is a child process of train.py."""
