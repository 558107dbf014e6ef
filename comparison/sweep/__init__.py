"""Runs sweeps and searches: each job is a child process of train.py."""
