"""What the HTTP front costs: against the queue alone, and for each idle stream."""
