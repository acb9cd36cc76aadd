"""How the pool is checked: schedules, a model, hammers, faults, and mutants that show that the checks can fail."""
