"""The science of Casemate: pure torch and numpy on one device; no Ray, no MLflow, no YAML."""
