"""KV caches and recurrent states: slots of a batch, segments, the prefix cache."""
