"""Networks that timm cannot build by name and options."""
