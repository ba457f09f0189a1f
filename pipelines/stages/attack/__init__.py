"""Stage attack: a list of attacks on the test items."""
