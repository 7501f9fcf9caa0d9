"""Training in less memory: what is kept for the backward pass and what is computed again there."""
