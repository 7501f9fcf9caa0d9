"""How passes see and change a model. No pass is known here."""
