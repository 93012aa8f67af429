"""Manifests: which experts there are, of which generation, and who may use or change them."""
