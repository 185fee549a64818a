"""What can be said: the schema, its rules, presets and recipes by name, and errors. No torch, no Hydra."""
