"""The files of the store: their names, their format, and their encryption."""
