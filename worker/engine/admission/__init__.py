"""Memory of rows: which requests are admitted, which wait, and which rows are preempted."""
