"""What a worker leaves to the machine that it runs on, and to the person who uses it."""
