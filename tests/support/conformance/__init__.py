"""Real clients against the HTTP gateway: each in an environment of its own, every call that it has."""
