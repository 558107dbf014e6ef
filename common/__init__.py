"""Shared by every package: errors, settings, files, the console, plots, devices and the machine."""
