"""Small models of thirty architectures, with random weights, for tools/check_architectures.py."""
