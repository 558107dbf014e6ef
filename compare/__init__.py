"""Reads what finished runs left on disk; makes tables and pictures. It computes nothing that a run did not log."""
