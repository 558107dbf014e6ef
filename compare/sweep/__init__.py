"""Runs many trainings as child processes and collects their outcomes."""
