"""Megatron: flags of Megatron-LM, and the precision fields of Megatron Core, NeMo and Megatron-Bridge."""
