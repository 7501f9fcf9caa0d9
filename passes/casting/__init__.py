"""What `passes.cast_precision` puts around forwards, and how it measures what a layer loses."""
