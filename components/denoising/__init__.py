"""Denoisers: a diffusion network as the first part of a smoothed classifier."""
