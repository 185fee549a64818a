"""Reference page generators: docs/reference as text, one module for each subject."""
