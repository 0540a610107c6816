"""Measurements. Each module is a command; its output is what docs/log.md quotes."""
