"""Data parallelism over torch.distributed: gradient sync, quantized all-reduce, ZeRO-1/2 owners, FSDP2."""
