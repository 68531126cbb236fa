"""One chat job: its request, images, resuming, record and result."""
