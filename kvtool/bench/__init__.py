"""What `kvtool bench` runs: every row is checked against a float64 result before it is timed (`measuring`)."""
