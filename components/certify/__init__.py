"""What a model provably withstands: ablation sets, noise blocks, bounds, certificates, verify."""
