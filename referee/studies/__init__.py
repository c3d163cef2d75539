"""One question a file, each run as `python -m referee.studies.NAME` in the repository's folder."""
