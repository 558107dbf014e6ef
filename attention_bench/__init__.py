"""Times attention backends side by side, for bench.py.

config.py     the config of bench.py
measure.py    the cases, a process for each backend, and what a process measures
results.py    the fastest backends, the tables in the terminal, and attention.png
"""
