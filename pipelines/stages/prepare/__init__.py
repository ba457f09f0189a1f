"""Stage prepare: any data source to checksummed shards."""
