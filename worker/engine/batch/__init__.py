"""The rows that decode together, in groups of similar length."""
