"""Several models on one machine: a process for each that is loaded, and one memory budget for all."""
