"""Why a model behaves as it does: layer correlation, lesions, restricted attention, pictures.

README.md says what a worker computes for one unit and which states are merged.
"""
