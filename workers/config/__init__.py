"""Settings of roles, engines, models, losses and optimisers: dataclasses that import nothing heavy."""
