"""Images and plots."""
