"""How far a user's own metric drops from the original to a candidate, with a bound that holds at a stated confidence."""

from optimizer.accuracy.drops import PairedTest, Search

__all__ = ["PairedTest", "Search"]
