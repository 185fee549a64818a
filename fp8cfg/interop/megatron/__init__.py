"""Megatron-LM's flags, and the precision fields of Megatron Core, NeMo and Megatron-Bridge."""
