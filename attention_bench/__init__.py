"""Times attention backends side by side, for bench.py.

config.py     the config of bench.py
measure.py    one case in this process: inputs, kernel, errors, memory and times
rounds.py     a process for each backend, and the rounds in which they take turns
results.py    the fastest backends, the tables in the terminal, and attention.png
"""
