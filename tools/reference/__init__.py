"""Pages of docs/reference as text, one module a subject."""
