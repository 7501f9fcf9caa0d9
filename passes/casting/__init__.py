"""The forward wrappers of `passes.cast_precision`, and the measurement of each layer's precision loss."""
