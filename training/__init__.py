"""Training: the modules that the loop in train.py calls."""
