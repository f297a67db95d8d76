"""The demo's data set, tokenizer and base model, all made from the Python standard library."""
