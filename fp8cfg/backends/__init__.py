"""Who multiplies: which backend runs a recipe here, and what each linear layer will do. No torch in the package itself."""
