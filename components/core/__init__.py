"""Words that all rooms share: types, threat models, seeding, errors, digests."""
