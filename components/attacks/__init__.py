"""Attacks: from model, images, labels, budget and generator to adversarial images."""
