"""What a graph depends on: tensors, buffers, owners and fingerprints. Loads nothing at import."""
