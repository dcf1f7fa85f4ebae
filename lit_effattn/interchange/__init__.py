"""Exchange with other programs: export of steps and weights, conversion of pretrained models."""
