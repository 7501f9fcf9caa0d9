"""What `passes.channels_last` puts around forwards, and how it sees where the format is lost."""
