"""Adapters: how the laws call the modules of several packages."""
