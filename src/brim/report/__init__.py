"""What a person sees: tables and plots. No torch."""
