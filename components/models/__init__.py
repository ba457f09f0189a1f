"""Models that take [0, 1] pixels: specs, zoo, token dropping, voting, checkpoints."""
