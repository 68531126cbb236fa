"""Small files of workers in the folder, for people: which models use it, and since when they are outdated."""
