"""``python -m coalesce.memory``: what a training step takes, and of which kind, in four ways of training one model.

`measure` has the rulers: time, peak, the allocator's counters. `timeline` follows every allocation of a step and says
what it was for. `modes` are the four ways, `picture` draws them.
"""
