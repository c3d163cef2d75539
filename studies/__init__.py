"""Studies of trained networks. Run each file in the repository's folder: python -m studies.NAME"""
