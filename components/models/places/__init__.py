"""Where models come from: a folder, a hub, a saved program, code of the user's."""
