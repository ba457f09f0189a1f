"""One folder per stage: `run(recipe, inputs, out)` reads finished folders and writes its own."""
