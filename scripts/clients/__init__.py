"""Real clients against the HTTP front: each in an environment of its own, every call that it has."""
