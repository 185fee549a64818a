"""The torchao backend."""
