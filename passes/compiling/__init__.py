"""How modules are compiled: which of them, by what code, and what became of it."""
