"""Functions (model, images, labels, budget, generator) to adversarial images."""
