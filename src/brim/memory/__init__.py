"""How much memory a step takes, known before it runs."""
