"""Stage tune: a search over recipe keys with Ray Tune."""
