"""ModelSpec to a module that eats [0, 1] pixels: zoo, token dropping, voting, checkpoints."""
