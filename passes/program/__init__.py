"""How passes see and change a model: recorded runs, matching, seals, rewriting. No pass is known here."""
