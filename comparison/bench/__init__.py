"""Times attention backends side by side: attention alone and complete training steps."""
