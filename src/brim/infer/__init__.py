"""Running a model over a data set: losses, texts, and figures made of them."""
