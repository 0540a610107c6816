"""A run in jobs: shared out, submitted, watched, and summed up."""
