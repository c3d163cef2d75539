"""Data sets and their transforms. Import each name from the file that defines it."""
