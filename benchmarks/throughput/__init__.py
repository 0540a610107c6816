"""Steps per second of the same experiments, by coalesce and by what people would use instead. See `__main__`."""
