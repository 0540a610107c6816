"""What a person sees: the plan, the progress, the summary."""
