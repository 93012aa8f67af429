"""Overlap: the next step of decoding is prepared and queued while one runs."""
