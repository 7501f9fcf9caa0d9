"""Train in less memory: choose what is kept for the backward pass, and recompute the rest there."""
