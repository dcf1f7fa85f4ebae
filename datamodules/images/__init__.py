"""Images: pixel sequences and labelled images."""
