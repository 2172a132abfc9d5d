"""Training data and schedules: sequence lengths, mixtures, budgets."""
