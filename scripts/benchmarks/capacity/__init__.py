"""Capacity of one server: simulated workers and real readers, until the server or this machine is full."""
