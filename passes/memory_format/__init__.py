"""Formats of feature maps: what they cost, where they are lost, and the forward wrappers for training."""
