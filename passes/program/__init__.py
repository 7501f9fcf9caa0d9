"""How passes see and change a model: recorded runs, captured graphs, matching, seals, rewriting. No pass is known here."""
