"""Certificates against one square patch: ablation votes and double masking."""
