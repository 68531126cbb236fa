"""Runs one chat job: request, images, resuming, recording, result."""
