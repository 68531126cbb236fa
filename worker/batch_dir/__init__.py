"""The folder whose batch files the worker runs by itself."""
