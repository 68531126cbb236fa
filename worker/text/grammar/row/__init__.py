"""Grammar state of one row: its answer, the reasoning before it, and drafts after it."""
