"""Small files of workers in the folder, for people: models that use it, hits, and what memory holds."""
