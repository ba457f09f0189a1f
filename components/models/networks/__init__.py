"""Networks that timm has no name for and cannot be told to build by options alone."""
