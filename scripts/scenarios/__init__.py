"""What can go wrong, made to happen: at a modest size by the tests, at full size by scripts/chaos."""
