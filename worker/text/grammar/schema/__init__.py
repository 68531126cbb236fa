"""JSON schemas as clients send them, rewritten so that llguidance holds every keyword that is left in them."""
