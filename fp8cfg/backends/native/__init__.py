"""The native backend: FP8 arithmetic in plain torch, emulated or through torch's scaled matrix products."""
