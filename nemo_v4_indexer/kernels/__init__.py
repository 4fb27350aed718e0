"""The operation on Hopper GPUs as TileLang programs. Importing this package loads no TileLang."""
