"""How an effective batch is cut up."""
