"""The MS-AMP backend."""
