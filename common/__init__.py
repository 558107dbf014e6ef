"""Shared by every package: errors, files, run folders, the console and facts about the machine."""
