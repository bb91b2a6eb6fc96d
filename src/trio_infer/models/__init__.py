"""What a model is, how it runs, and how it is stopped."""
