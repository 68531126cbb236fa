"""What the HTTP gateway costs: against the queue alone, and for each idle stream."""
