"""Many experiments, one graph: stacking, operator rules, tracing, the step, compiling."""
