"""Lanes over time: filling, stepping, evaluating, freezing, refilling."""
