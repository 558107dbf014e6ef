"""Reads finished runs and compares them: statistics, tables and plots."""
