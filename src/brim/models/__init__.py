"""The base model: where it lies, how it is loaded, adapted and made to give a loss."""
