"""One question a file, each run as `python -m referee.NAME` in the repository's folder."""
