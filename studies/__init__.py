"""One question a file, each run as `python -m studies.NAME` in the repository's folder."""
