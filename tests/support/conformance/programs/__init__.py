"""Programs that people use, each driven against a real gateway and a worker whose answers are scripted."""
