"""Images as the model takes them: processors, encoders, positions, memory."""
