"""The worker's use of Redis and arq: claims, leases, events, presence, cancellation, server checks."""
