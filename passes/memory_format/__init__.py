"""The forward wrappers of `passes.channels_last`, and the detection of places where channels_last is lost."""
