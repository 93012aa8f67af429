"""Layers: a step's products with experts in slots, or through scratch memory."""
