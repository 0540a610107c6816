"""Schedules of the learning rate, each with a linear warm-up in front. One more is one small file here, one row in
`coalesce.optim` and one in the tests."""
