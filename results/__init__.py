"""Reads run folders: the registry of metrics, comparison, tables and plots."""
