"""The packaged language model: its weights, and what makes text of them."""
