"""Small files of workers in the folder, for `sluice prefix`: models, hits, pins, and what memory holds."""
