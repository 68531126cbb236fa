"""`scripts/bench prefix --disk`: the prefix cache on disk."""
