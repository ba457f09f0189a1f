"""What all components share: settings, registries, types, seeding, statistics, errors, files."""
