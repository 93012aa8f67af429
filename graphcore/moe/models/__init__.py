"""Models: a whole model of transformers with its experts in slots."""
