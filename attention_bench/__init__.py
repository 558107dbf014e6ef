"""Times attention backends side by side."""
