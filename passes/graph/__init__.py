"""The only code that knows torch.fx."""
