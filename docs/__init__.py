"""What writes the pages and documents that are generated."""
