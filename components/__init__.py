"""The science of Casemate: pure torch and numpy on one device; no Ray, no MLflow, no YAML."""

from components.core import late_compiler

late_compiler.install()  # before anything imports timm
