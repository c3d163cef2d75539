"""Data in, tensors out: import from the file that holds what you need."""
