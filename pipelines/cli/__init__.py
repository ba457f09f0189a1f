"""The `casemate` command: parsing and printing only, one module per group of commands."""
