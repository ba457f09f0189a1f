"""Certificates against l2 perturbations: randomized smoothing."""
