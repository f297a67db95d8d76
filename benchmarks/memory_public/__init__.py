"""Compare predictions with public measurements of other people's runs, made with older libraries than brim's."""
