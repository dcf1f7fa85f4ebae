"""Builders of data sets from public packages: `python -m scripts.NAME --help`."""
