"""A simulation of the engine's steps on a virtual clock, to compare ways of planning them."""
